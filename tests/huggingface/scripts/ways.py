"""A user's script: python ways.py WAY...

Trains in one way after the other and prints what came of each. "fail" ends rank 1 in the midst of
one more training.
"""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from transformers import TrainerCallback

from tests.huggingface.training import bert, digest, gaps, losses, rows, trainer
from tests.ranks import free_port


def by_trainer(**arguments):
    trained = trainer(tempfile.gettempdir(), **arguments)
    trained.train()
    mode = trained.args.parallel_mode.name
    return trained.args.distributed_state, mode, losses(trained), trained.model


def by_accelerator(**arguments):
    accelerator = Accelerator(**arguments)
    torch.manual_seed(5)
    model = bert()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        torch.utils.data.DataLoader(rows(16), batch_size=2, collate_fn=gaps),
    )
    found = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.wait_for_everyone()
    return accelerator.state, type(model).__name__, found, accelerator.unwrap_model(model)


class Fault(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if args.process_index == 1 and state.global_step == 2:
            raise ArithmeticError("a fault of the script")


def fail():
    failing = trainer(tempfile.gettempdir(), ddp_backend="smddp")
    failing.add_callback(Fault())
    failing.train()


def after_init():
    dist.init_process_group("smddp")
    return by_accelerator()


WAYS = {
    "trainer": lambda: by_trainer(ddp_backend="smddp"),
    "trainer on cpu": lambda: by_trainer(ddp_backend="smddp", use_cpu=True),
    "trainer, plain": by_trainer,
    "trainer on cpu, plain": lambda: by_trainer(use_cpu=True),
    "trainer over gloo": lambda: by_trainer(ddp_backend="gloo", use_cpu=True),
    "accelerator after init": after_init,
    "accelerator, plain": by_accelerator,
    "accelerator on cpu": lambda: by_accelerator(
        cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="smddp")]
    ),
    "accelerator over gloo": lambda: by_accelerator(cpu=True),
    "fail": fail,
}


def leave():
    """Leave the group; the next one meets elsewhere, for a rank may still find this one's store."""
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    AcceleratorState._reset_state(True)
    if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        os.environ["MASTER_PORT"] = str(port[0])


for way in sys.argv[1:]:
    state, kind, curve, model = WAYS[way]()
    found = [dist.get_backend(), state.backend, state.distributed_type.name, kind]
    result = [way, state.process_index, state.num_processes, found, curve, digest(model)]
    print("result " + json.dumps(result) + "\n", end="", flush=True)
    leave()
