"""Measures a model on the test split of the proxy task that its folder comes from."""

from collections.abc import Mapping
from pathlib import Path

import torch

from deltalab.errors import InputError
from deltalab.evaluation.items import Items, item_id, of_items
from deltalab.evaluation.model_folder import ModelFolder
from deltalab.evaluation.results import Result
from deltalab.export.folders import from_folder
from deltalab.export.retrain import load_rules
from deltalab.models.model import Model
from deltalab.registry import get_task
from deltalab.tasks import IGNORE, Batch, Task
from deltalab.training.evaluation import EVALUATION_SEED

Scores = dict[str, tuple[torch.Tensor, torch.Tensor]]


def proxy(folder: ModelFolder) -> list[Result]:
    """Measures the metrics of the proxy task that a folder comes from, over as many batches as its trial did.

    The items are the examples, each with all its answers.

    Raises:
        InputError: If the folder comes from no proxy task, or if its model has another vocabulary.
    """
    task = proxy_task(folder)
    if isinstance(task, str):
        raise InputError(f"task 'proxy': {folder.named}: {task}")
    source = from_folder(Path(folder.path))
    assert source.weights is not None
    model = Model(source.model)
    model.load_state_dict(dict(source.weights()))
    model.to(folder.device).eval()
    train = folder.recipe["trial"]["train"]
    items: dict[str, Items] = {}
    evaluations = task.evaluations()
    for label, part in evaluations.items():
        ends = [f"@{label}" if label else "", *([] if "" in evaluations else [""])]
        rows, batches = task.evaluated(part, "test", train["batch_size"], train["eval_batches"])
        for i in range(batches):
            batch = part.batch("test", rows, EVALUATION_SEED, i, folder.device)
            with torch.no_grad():
                logits = model(batch.inputs, batch.targets != IGNORE)
            for example, scores in by_example(part, batch, logits.float()):
                for name, (total, count) in scores.items():
                    for end in ends if count.item() else ():
                        found = items.setdefault(name + end, Items([], [], []))
                        found.ids.append(example)
                        found.totals.append(total.item())
                        found.weights.append(count.item())
    return [of_items(folder.step, f"proxy {task.name}", name, found) for name, found in items.items()]


def by_example(task: Task, batch: Batch, logits: torch.Tensor) -> list[tuple[str, Scores]]:
    """Measures each example of a batch on its own.

    Args:
        task: The task.
        batch: The examples.
        logits: The logits at the scored positions, row-major, [N, vocab_size].

    Returns:
        For each example with a scored position its id, and metric -> (total, count) as `Task.measure` gives them.
    """
    found: list[tuple[str, Scores]] = []
    begin = 0
    for inputs, targets in zip(batch.inputs.split(1), batch.targets.split(1), strict=True):
        end = begin + int((targets != IGNORE).sum())
        if end > begin:
            example = item_id(inputs.cpu().numpy().tobytes(), targets.cpu().numpy().tobytes())
            found.append((example, task.measure(Batch(inputs, targets), logits[begin:end])))
        begin = end
    return found


def proxy_task(folder: ModelFolder) -> Task | str:
    """Returns the proxy task that a folder comes from, or the reason that its model cannot be asked the task."""
    trial = folder.recipe.get("trial")
    if not isinstance(trial, Mapping):
        return "the model does not come from a study"
    load_rules(Path(folder.path))
    vocabulary = folder.vocab_size
    try:
        task = get_task(trial["task"]["name"], **trial["task"]["parameters"])
    except InputError as error:  # for example, this machine lacks the plugin of the task
        return str(error)
    if task.readout != "position":
        return f"task '{task.name}' asks for one answer at the end, and the model gives one at each position"
    if vocabulary != task.vocab_size:
        return f"the model's vocabulary has {vocabulary} ids now, and that of task '{task.name}' {task.vocab_size}"
    return task
