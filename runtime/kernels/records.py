"""A decoder as its kernels see it: a row of whole numbers for each layer, most of them addresses.

One call of a kernel goes through all layers, and numba takes arrays one by one; so what is fixed is written down once,
in numbers. Whoever makes a record keeps the arrays that it points to. 0 is the address of what is not there.

Knows no model; `projection.py` and `decoder.py` fill these in, `products.py` and `step.py` read them.
"""

from __future__ import annotations

MAX_ROWS = (
    32  # beyond, torch's products of whole matrices are the faster ones; the height of all inputs and outputs
)

# A projection: x (MAX_ROWS, NUM_IN) uint16 at INPUT → OUT (MAX_ROWS, NUM_OUT) float32, BIAS (NUM_OUT,) uint16. Where
# its weights are quantised: room for its quantised inputs.
NUM_PARTS, NUM_IN, NUM_OUT, BIAS, INPUT, OUT, NUMBERS, SCALES, TOTALS, RUN_SIZE, FIRST_PART = range(11)

# Its parts, matrices whose products stand side by side: weights (NUM_WEIGHT_ROWS, NUM_IN), from column FIRST on.
# BIG_SCALES: scales are float32, not bf16. GROUP_SHIFT: a group of int4 has 2^that runs.
KIND, FIRST, NUM_WEIGHT_ROWS, WEIGHT, SCALE, ZERO, BIG_SCALES, GROUP_SHIFT, PART_FIELDS = range(9)
MAX_PARTS = 3
PROJECTION_FIELDS = FIRST_PART + MAX_PARTS * PART_FIELDS

BF16, INT8, INT4 = range(3)

# A layer: the weights of its norms (hidden_size,) uint16, those of its heads' (2, head_dim) uint16; the first token
# that is seen, as a row of `firsts`; and where its four projections begin.
ATTENTION_NORM, MLP_NORM, HEAD_NORMS, WINDOW, QKV = range(5)
OUTPUT = QKV + PROJECTION_FIELDS
GATE_UP = OUTPUT + PROJECTION_FIELDS
DOWN = GATE_UP + PROJECTION_FIELDS
LAYER_FIELDS = DOWN + PROJECTION_FIELDS
