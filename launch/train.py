"""Entry script for launchers: one rank of `leviathan train`, or of `leviathan check` with --probe.

deepspeed --num_accelerators 2 launch/train.py RUN.yaml [a.b=c …]
torchrun --nproc-per-node 2 launch/train.py RUN.yaml [a.b=c …]
"""

import sys

from leviathan.cli import main

if __name__ == "__main__":
    # The deepspeed launcher adds --local_rank=N; the environment contains the same value.
    given = [a for a in sys.argv[1:] if not a.startswith(("--local_rank", "--local-rank"))]
    sys.argv[1:] = ["check" if "--probe" in given else "train", *given]
    main()
