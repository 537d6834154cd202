"""A user's mistakes: pyright finds one in every line that ends with `# wrong`, and no others."""

import kubetorch as kt


def train(steps: int, lr: float = 0.1) -> dict[str, float]:
    return {"loss": lr / steps}


class Counter:
    def add(self, k: int) -> int:
        return k


f = kt.fn(train).to(kt.Compute(cpus=1))
f("ten")  # wrong
f()  # wrong
f(10, rate=0.5)  # wrong
f.options(timeout=1)("ten")  # wrong
f.options(timout=1)(10)  # wrong
f.spawn("ten")  # wrong
result: int = f(10)  # wrong

counter = kt.cls(Counter).to(kt.Compute())
counter.add("two")  # wrong
counter.remove(2)  # wrong
text: str = counter.add(2)  # wrong

kt.Compute(cpu=1)  # wrong
kt.Compute(replicas="two")  # wrong
kt.fn(train).to(cpus=1)  # wrong
kt.Compute(gpus=[1])  # wrong
kt.Compute(tolerations=[5])  # wrong
kt.Compute().autoscale(1)  # wrong
kt.Compute().distribute(workers=[2])  # wrong
kt.compute(cpu=1)  # wrong
kt.compute(cpus=1)(train)("ten")  # wrong
pool = kt.Compute()
pool.gpus = [1]  # wrong
pool.replicas = "x"  # wrong
pool.manifest = {}  # wrong
print(kt.Imag)  # wrong
print(kt.config.usrname)  # wrong
