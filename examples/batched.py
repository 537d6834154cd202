"""A model that is called with single texts, and runs on several of them at a time."""

import time

import kubetorch as kt


class Model:
    def __init__(self) -> None:
        self.batches = 0

    @kt.batched(max_size=8, wait=0.05)
    def predict(self, texts: list[str]) -> list[int | Exception]:
        """Stands for a model, which takes as long for one text as for eight."""
        self.batches += 1
        time.sleep(0.02)
        return [len(text.split()) or ValueError(f"no words in {text!r}") for text in texts]

    def count(self) -> int:
        return self.batches


if __name__ == "__main__":
    handle = kt.cls(Model)
    model = handle.to(kt.Compute(cpus="0.2"))
    texts = ["to be or not to be", "that is the question", "", "whether it is nobler"] * 20

    answers = list(handle.predict.map(texts, return_exceptions=True))
    print("answers:", len(answers), answers[:4])
    print("in batches:", model.count() < len(texts) / 2)
    handle.teardown()
