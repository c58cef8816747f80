"""An instance: one model being served, from its address to its end.

`startup.py` is what happens between exec and the first token. `instance.py` is the life after that: state, figures,
draining, the end. The others are steps of a start: `helpers.py` launches processes, `loading.py` requests the
manifest, chooses a load and starts it, `model.py` builds what answers, `exactness.py` compares weights with their
digests, `base.py` lends a model in memory to its fine-tunes. Imports nothing, as a start pays for each import.
"""
