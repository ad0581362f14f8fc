"""Carries a plan out on one rank: engine, stage, transport, KV slots and sliced attention."""
