"""Carries a plan out on one rank.

`engine` walks the list; `stage` is the rank's part of the model; `kv_slots` and `sliced_attention` the attention of a
slice over its prefix; `transport`, `collectives` and `exchange` move tensors between ranks; `vocabulary` and `loans`
carry out what those two are for; `warm_up`, `clock` and `watchdog` stand around it.
"""
