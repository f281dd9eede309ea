"""train.py with a spy or a fault in it, for tests: `python tests/spy.py FLAGS`, or by torchrun.

SPY_DIR: each rank writes there, at every step, its gradients and its weights after the update.
SPY_NAN: "STEP:RANK" makes that rank's loss NaN in that step.
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model  # noqa: E402
import train  # noqa: E402

RANK = int(os.environ.get("RANK", 0))


def main():
    make_optimizer, update, forward = train.make_optimizer, train.update, model.GPT.forward
    nan_step, nan_rank = map(int, os.environ.get("SPY_NAN", "0:0").split(":"))
    seen = {"step": 1}

    def spied_optimizer(net, settings):
        def spied_update(*args):
            grads = {name: p.grad.clone() for name, p in net.named_parameters()}
            norm = update(*args)
            if folder := os.environ.get("SPY_DIR"):
                weights = {name: p.detach().clone() for name, p in net.named_parameters()}
                state = {"grads": grads, "weights": weights}
                torch.save(state, Path(folder, f"rank{RANK}_step{seen['step']}.pt"))
            seen["step"] += 1
            return norm

        train.update = spied_update
        return make_optimizer(net, settings)

    def spied_forward(self, idx, targets=None, pos_offset=0):
        logits, loss = forward(self, idx, targets, pos_offset)
        if loss is not None and (seen["step"], RANK) == (nan_step, nan_rank):
            loss = loss * float("nan")
        return logits, loss

    train.make_optimizer = spied_optimizer
    model.GPT.forward = spied_forward
    train.main(sys.argv[1:])


if __name__ == "__main__":
    main()
