"""Transfers inside a node by copy engine, out of memory that its GPUs share (docs/carriers.md).

A lane is one direction between two ranks. The sender copies a tensor into a ring of its own memory, on its compute
stream, and raises the receiver's `ready` counter; the receiver's copy engine, on a stream of its own, waits for that,
reads the ring over NVLink, and raises the sender's `taken` counter, behind which the ring's bytes are written again.

Why the receiver reads and the sender does not write:
- 370 GB/s each way were measured so, beside attention and GEMMs (docs/h200.md);
- data lies still in the sender's memory until it is read, so only counters are ever written from afar, and no reader
  has to flush remote writes before it may trust its memory;
- it is read straight to where it is wanted (a fresh tensor, the exchange's buffers), and the sender's tensor is free
  as soon as the compute stream is past its local copy: neither outlives what NCCL makes of it;
- the copy into the ring is at memory bandwidth: 64 MiB take some 60 us of a slice's 100 ms.

Counters are waited for and raised by the streams themselves (cuStreamWaitValue32, cuStreamWriteValue32): nothing spins
on a processor, where one waiting block would cost a persistent kernel a whole wave. The host never waits.
"""
