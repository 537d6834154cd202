"""A model that many callers ask at once, and that answers them in batches."""

import asyncio
import time

import kubetorch as kt


def forward(texts: list[str]) -> list[int]:
    """Stands for the model, which takes as long for one text as for eight."""
    time.sleep(0.02)
    return [len(text.split()) for text in texts]


class Model:
    def __init__(self, batch_size: int = 8) -> None:
        self.batch_size = batch_size
        self.batches = 0
        self.waiting: list[tuple[str, asyncio.Future[int]]] = []
        self.work: asyncio.Task[None] | None = None

    async def predict(self, text: str) -> int:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((text, answer))
        if self.work is None:
            self.work = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        """Answer all that wait, so many at a time."""
        while self.waiting:
            await asyncio.sleep(0.005)  # more may come
            batch = self.waiting[: self.batch_size]
            del self.waiting[: self.batch_size]
            texts = [text for text, _ in batch]
            try:
                results = await asyncio.to_thread(forward, texts)
            except Exception as error:  # noqa: BLE001  # its callers get it
                for _, answer in batch:
                    answer.cancelled() or answer.set_exception(error)
            else:
                self.batches += 1
                for (_, answer), result in zip(batch, results, strict=True):
                    answer.cancelled() or answer.set_result(result)
        self.work = None

    def count(self) -> int:
        return self.batches


if __name__ == "__main__":
    handle = kt.cls(Model)
    compute = kt.Compute(cpus="0.2", concurrency=32)
    model = handle.to(compute, init_args={"batch_size": 8})
    texts = ["to be or not to be", "that is the question"] * 40

    answers = list(handle.predict.map(texts))
    print("answers:", len(answers), answers[:4])
    print("in batches:", model.count() < len(texts) / 2)
    handle.teardown()
