"""Ways of tensors from process to process, past the store. Knows nothing of keys and windows.

A putter cuts the bytes of its tensors into frames (`frames`), agrees with its getters on who takes
part (`plans`, `rendezvous`), and hands the frames to a `transport`: `process_group` or `cuda_ipc`.
A further one, such as RDMA, is a class with the two methods of `Transport` and a name in `Start`.

A getter writes to its destination when all bytes have come and are those of the version. Nothing
here imports torch: who has tensors has it.
"""
