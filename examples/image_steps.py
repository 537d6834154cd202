"""An image with two pip steps; then one more step is added, and is live without a restart.

What the steps made is kept: the second deploy installs one package, and the pod stays.
"""

import kubetorch as kt


def table(sizes: dict[str, int]) -> str:
    import humanize  # only pods have it
    import tabulate

    return tabulate.tabulate([(name, humanize.naturalsize(size)) for name, size in sizes.items()])


def slug(text: str) -> str:
    import slugify

    return slugify.slugify(text)


if __name__ == "__main__":
    image = kt.Image().pip_install(["tabulate", "humanize"]).set_env_vars({"STAGE": "test"})
    compute = kt.Compute(cpus="0.1", image=image)

    remote = kt.fn(table, name="reports").to(compute)
    print(remote({"model": 3_000_000, "data": 12_500_000}))
    before = remote.service_config["pods"][0]["pid"]

    image.pip_install("python-slugify")
    remote = kt.fn(slug, name="reports").to(compute)
    print(remote("One More Step"))
    print("the same pod:", remote.service_config["pods"][0]["pid"] == before)
    print(image.contents)
    remote.teardown()
