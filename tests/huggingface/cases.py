"""What the ranks of a pool run: `case(rank, world, ...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import transformers.training_args as of_arguments
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import EvalPrediction, Trainer

from sdp_plugins.torch import ProcessGroup
from tests.huggingface.training import bert, digest, gaps, losses, rows, trainer
from tests.torch.direct_nets import changed_layers, writes

LARGE = 10_000  # elements of a bucket, and of nothing else that is reduced


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    """A case with accelerate's state and a process group of its own."""

    @wraps(function)
    def run(rank: int, world: int, *args: Any) -> Any:
        try:
            return function(*args)
        finally:
            reset()

    return run


def reset() -> None:
    """Leave the process group, and have accelerate begin anew."""
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def counted_buckets() -> Iterator[list[int]]:
    """Sizes of the buckets that are reduced over smddp meanwhile."""
    sizes: list[int] = []
    reduce = ProcessGroup.allreduce

    def allreduce(self: Any, tensors: Any, *args: Any) -> Any:
        first = tensors[0] if isinstance(tensors, list) else tensors
        if first.numel() > LARGE:
            sizes.append(first.numel())
        return reduce(self, tensors, *args)

    ProcessGroup.allreduce = allreduce  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        ProcessGroup.allreduce = reduce  # type: ignore[method-assign]


def wrong_bytes(prediction: EvalPrediction) -> dict[str, float]:
    """A metric of single rows, of which none may be missing or come twice."""
    guesses, labels = prediction.predictions, prediction.label_ids
    asked = labels != -100
    wrong = ((guesses.argmax(-1) != labels) & asked).sum()
    return {"rows": len(guesses), "wrong": int(wrong), "asked": int(asked.sum())}


def with_evaluation(backend: str, folder: str, **arguments: Any) -> Trainer:
    """A Trainer over a backend."""
    given = {"ddp_backend": backend, "use_cpu": True, **arguments}
    made = trainer(folder, **given)
    made.compute_metrics = wrong_bytes
    return made


@case
def fit(backend: str, folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Training with evaluations of seven rows, two on each rank at a time."""
    made = with_evaluation(backend, folder, eval_strategy="steps", eval_steps=2, **arguments)
    with counted_buckets() as buckets:
        made.train()
    evaluations = [
        {name: value for name, value in entry.items() if "per_second" not in name}
        for entry in made.state.log_history
        if "eval_loss" in entry
    ]
    for evaluation in evaluations:
        del evaluation["eval_runtime"]
    predicted = made.predict(rows(7)).predictions
    found = {"losses": losses(made), "evaluations": evaluations, "digest": digest(made.model)}
    return {**found, "buckets": len(buckets), "predicted": predicted.tobytes()}


@case
def write_directly(backend: str, folder: str) -> tuple[Any, ...]:
    """Training of a model with large layers, of which some are frozen, and an evaluation."""
    made = trainer(folder, ddp_backend=backend, use_cpu=True, width=1024)
    made.model.bert.encoder.layer[0].output.dense.requires_grad_(False)
    made.model.bert.encoder.layer[0].attention.output.dense.requires_grad_(False)
    with writes() as told:
        made.train()
    is_view = made.model_wrapped.gradient_as_bucket_view
    evaluated = made.evaluate()["eval_loss"]
    return losses(made), evaluated, digest(made.model), sum(told), is_view


@case
def own_options(backend: str, folder: str) -> tuple[Any, ...]:
    """Whether gradients are views, and layers write, with options that a script gives."""
    group = InitProcessGroupKwargs(backend=backend)
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    found: list[Any] = []
    for handlers in ([group, views], [group]):
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
        ddp = accelerator.prepare(torch.nn.Linear(1024, 1024))
        found += [ddp.gradient_as_bucket_view, changed_layers(ddp)]
        assert accelerator.prepare_model(ddp.module, evaluation_mode=True) is ddp.module
    made = trainer(folder, ddp_backend=backend, use_cpu=True, width=1024)
    made.gradient_as_bucket_view = False
    with writes() as told:
        made.train()
    return *found, made.model_wrapped.gradient_as_bucket_view, sum(told)


@case
def unused(backend: str, folder: str, find: bool) -> list[float] | str:
    """Training of a model of which a part is not used."""
    made = trainer(folder, ddp_backend=backend, use_cpu=True, ddp_find_unused_parameters=find)
    made.model.unused = torch.nn.Linear(2, 2)
    try:
        made.train()
    except RuntimeError as error:
        return str(error)
    return losses(made)


@case
def stop_and_resume(backend: str, folder: str) -> list[tuple[list[float], str]]:
    """Six steps at a time, and six of which the last three follow a checkpoint."""
    found = []
    for resume in (None, f"{folder}/checkpoint-3"):
        arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        made = with_evaluation(backend, folder, **arguments)
        made.train(resume_from_checkpoint=resume)
        found.append((losses(made), digest(made.model)))
    return found


@case
def collectives(backend: str) -> dict[str, Any]:
    """What accelerate's users gather, after init_process_group in the script."""
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=backend == "gloo")
    rank = accelerator.process_index
    own = torch.arange(2 + rank) + 10 * rank
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(7), batch_size=2))
    padded = accelerator.pad_across_processes(own, pad_index=-1)
    accelerator.wait_for_everyone()
    return {
        "type": accelerator.distributed_type.name,
        "backend": accelerator.state.backend,
        "padded": accelerator.gather(padded).tolist(),
        "metrics": [accelerator.gather_for_metrics(batch).tolist() for batch in loader],
        "mean": accelerator.reduce(torch.tensor([float(rank)]), "mean").tolist(),
        "sum": accelerator.reduce({"a": torch.tensor(rank + 1)}, "sum")["a"].item(),
        "objects": gather_object([{"rank": rank}]),
        "told": broadcast_object_list([f"of {rank}"]),
    }


@case
def accumulate(backend: str, folder: str) -> dict[str, Any]:
    """accelerate's own accumulation of gradients over two batches, and its checkpoints."""
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = bert()
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(rows(16), batch_size=2, collate_fn=gaps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with counted_buckets() as buckets:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    trained = digest(accelerator.unwrap_model(model))
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()  # the main process writes the model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    loaded = digest(accelerator.unwrap_model(model))
    wrapped = isinstance(model, DistributedDataParallel)
    return {"trained": trained, "loaded": loaded, "buckets": len(buckets), "wrapped": wrapped}


@case
def over_gloo(folder: str) -> tuple[str, bool]:
    """What a job over gloo finds: accelerate's choice, and whether transformers is as it was."""
    trainer(folder, use_cpu=True, max_steps=1).train()
    untouched = not hasattr(of_arguments.is_sagemaker_dp_enabled, "mended_for_smddp")
    return PartialState().backend, untouched
