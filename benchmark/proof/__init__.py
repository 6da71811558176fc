"""The parts of `benchmark/gpu_proof.py`.

`jobs` says what is run and `cases` lists it; `runner` starts one process per job within the time there is, `worker` is
that process; `memory`, `speed` (over `contenders` and `ours`), `capacity` and `links` do the work; `report` and
`figures` say what came of it. `place` is the device: a CUDA device, or in a rehearsal the CPU.
"""
