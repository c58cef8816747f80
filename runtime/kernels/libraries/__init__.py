"""Products of integer weights by the CPU kernels of other libraries, which hold a second copy in their own order.

`onnx_runtime` and `openvino` have the same interface, that of `models/packed.py`: `can_pack`, `packed_bytes`, and
`Product`, the copy that computes. Neither library is imported before a `Product` is built, and each is an extra. Their
kernels round the inputs to 8 bits, a scale for each block of at most 128 numbers of a row, and add up in fp32.

When a copy is worth its memory is not known here (`kernels/choice.py`).
"""
