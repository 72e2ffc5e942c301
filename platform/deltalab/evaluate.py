"""Measures a trained folder: its loss on packed data by length and position, retrieval from a long text, the proxy task
that it comes from, and tasks of lm-evaluation-harness."""

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from deltalab.errors import InputError
from deltalab.export.folders import from_folder
from deltalab.export.retrain import load_rules, read_recipe
from deltalab.export.write import export
from deltalab.models.model import Model
from deltalab.needles import questions
from deltalab.packed import Packed, Split
from deltalab.reading import read_json
from deltalab.registry import get_task
from deltalab.tasks import IGNORE, Task
from deltalab.training.evaluation import EVALUATION_SEED

OWN = ("loss", "needle", "needle_text", "proxy")
"""Our tasks; any other name is one of lm-evaluation-harness."""

TIMES = (1, 2, 4)
"""The lengths that are measured, in multiples of the training's."""

LIMIT = 64
"""Examples of each of our tasks and lengths, unless a user asks for others."""

NO_DATA = "it needs packed data: give --data PACKED"
NO_LENGTH = "no recipe says how long a training sequence is: give --length"
NO_TOKENIZER = "export it with --tokenizer"

NAME = re.compile(r"""^["']?(?:task|group|tag)["']?:[ \t]*["']?([^\s"'#\[\]]+)""", re.MULTILINE)
"""The name of a task, group or tag in a YAML file of the harness."""

FILE = "evaluations.json"
TOKENS_AT_ONCE = 2**14


@dataclass(frozen=True)
class Result:
    """A measured value. step: of the checkpoint, None where it is not known. examples: how many it is the mean of."""

    step: int | None
    task: str
    metric: str
    value: float
    examples: int | None
    stderr: float | None = None


@dataclass(frozen=True)
class Folder:
    """A folder that transformers loads. named: the folder that the user named, for messages.

    recipe: of the export, empty without one. training, step: the id of the run that trained it, and of how many steps,
    where they are known. run: the folder of this run where the user named it or its checkpoint, else None. data: the
    packed data that it was trained on, where they are known and still there.
    """

    path: Path
    named: Path
    recipe: Mapping[str, Any]
    training: str | None
    step: int | None
    run: Path | None
    data: Path | None

    @property
    def length(self) -> int | None:
        """Tokens of a training sequence."""
        batch = self.recipe.get("batch")
        return int(batch["length"]) if isinstance(batch, Mapping) else None

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def model(self) -> Any:
        """The model, in bfloat16 on a GPU. Raises `InputError` where transformers cannot load it."""
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise InputError("evaluation needs transformers: pip install 'deltalab[hf]'") from None
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        try:
            model = AutoModelForCausalLM.from_pretrained(self.path, trust_remote_code=True, dtype=dtype)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{self.named}: cannot be loaded: {' '.join(str(error).split())}") from None
        return model.to(self.device).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer. Raises `InputError` where it has none."""
        if not (self.path / "tokenizer.json").is_file():
            raise InputError(f"{self.named}: has no tokenizer: {NO_TOKENIZER}")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=True)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def logits(self, tokens: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """Logits after the last `keep` of tokens [B, T], or after all for 0, in float32."""
        with torch.no_grad():
            found: torch.Tensor = self.model(tokens.to(self.device), logits_to_keep=keep, use_cache=False).logits
        return found.float()


@contextmanager
def opened(folder: Path) -> Iterator[Folder]:
    """A folder that `platform export` wrote; or a run of `platform train`, or one of its checkpoints, which is exported
    for the length of the block.

    Raises `InputError` for any other folder, and for an export without weights.
    """
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if (run / "run.json").is_file():
        source = from_folder(folder)
        with tempfile.TemporaryDirectory() as made:
            path = Path(made) / "exported"
            export(source, path)
            origin = source.provenance
            step = int(str(origin["checkpoint"]).removeprefix("step-"))
            yield Folder(path, folder, source.recipe, str(origin["training"]), step, run, _trained_on(origin))
        return
    config = _config(folder)
    recipe = read_recipe(folder) if (folder / "recipe.yaml").is_file() else {}
    if not any(folder.glob("model*.safetensors")):
        raise InputError(f"{folder}: is exported without weights: train it first")
    origin = {**(config.get("provenance") or {}), **(recipe.get("provenance") or {})}
    checkpoint = re.fullmatch(r"step-(\d+)", str(origin.get("checkpoint")))
    yield Folder(
        folder,
        folder,
        recipe,
        origin.get("training"),
        int(checkpoint[1]) if checkpoint else None,
        None,
        _trained_on(origin),
    )


def evaluate(
    folder: Folder,
    tasks: Sequence[str],
    *,
    data: Packed | None = None,
    split: str = "validation",
    length: int | None = None,
    limit: int | None = None,
    include: Path | None = None,
) -> list[Result]:
    """Measures the tasks.

    `loss` needs packed data; `needle` a tokenizer; `needle_text` both; `proxy` a folder that was exported from a study
    and whose vocabulary is still the task's. Other names are tasks of lm-evaluation-harness, or its YAML files. length:
    tokens of a training sequence; by default, what the folder's recipe says. limit: examples of each task. include: a
    folder with YAML files of further tasks.

    Raises `InputError` for a task that there is not, and for one that lacks what it needs.
    """
    if data is not None:
        _require_same_tokenizer(folder, data)
    length = length or folder.length
    results: list[Result] = []
    others, folders = _of_harness([task for task in tasks if task not in OWN], include)
    needs_length = [task for task in tasks if task in ("loss", "needle", "needle_text")]
    if needs_length and length is None:
        raise InputError(f"{folder.named}: {NO_LENGTH}")
    for task in tasks:
        if task in ("loss", "needle_text") and data is None:
            raise InputError(f"task '{task}': {NO_DATA}")
        examples = limit or LIMIT
        if task == "loss" and data is not None:
            results += loss(folder, data.split(split), f"{task}", length or 0, examples)
        elif task == "needle":
            results += needle(folder, task, length or 0, examples, None)
        elif task == "needle_text" and data is not None:
            results += needle(folder, task, length or 0, examples, data.split(split))
        elif task == "proxy":
            results += proxy(folder)
    if others:
        results += harness(folder, others, folders, limit=limit)
    return results


def askable(
    folder: Folder, data: Packed | None, *, split: str = "validation", length: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Our tasks that a folder can be asked, and why not for each of the others.

    Raises `InputError` where there is none.
    """
    length = length or folder.length
    tokenizer = (folder.path / "tokenizer.json").is_file()
    texts = None if data is None else data.split(split)
    why_not: dict[str, str] = {}
    if length is None:
        why_not = dict.fromkeys(("loss", "needle", "needle_text"), NO_LENGTH)
    else:
        if texts is None:
            why_not["loss"] = NO_DATA
        elif not texts.rows(length):
            why_not["loss"] = _too_short(texts, length)
        for task, filler in (("needle", None), ("needle_text", texts)):
            if not tokenizer:
                why_not[task] = f"the folder has no tokenizer: {NO_TOKENIZER}"
            elif task == "needle_text" and texts is None:
                why_not[task] = NO_DATA
            elif not any(q for times in TIMES for q in questions(folder.encode, times * length, 1, filler=filler)):
                why_not[task] = _no_room(length, filler)
    if isinstance(found := _proxy_task(folder), str):
        why_not["proxy"] = found
    if len(why_not) == len(OWN):
        reasons = "; ".join(f"{task}: {reason}" for task, reason in why_not.items())
        raise InputError(f"{folder.named}: none of our tasks can be asked of it: {reasons}")
    return [task for task in OWN if task not in why_not], why_not


def loss(folder: Folder, split: Split, task: str, length: int, examples: int) -> list[Result]:
    """The mean loss in nats a token and in bits a byte, on rows of 1, 2 and 4 times the training's length; and on the
    longest rows by position, in ranges that double.

    Rows are spread evenly over the split, as many of each length as hold the tokens of `examples` rows of the shortest.
    A row's documents follow each other without a mark but their end. Lengths that the split is too short for are left
    out.

    Raises `InputError` where it is too short for a single row of the training's length.
    """
    if not split.rows(length):
        raise InputError(f"task '{task}': {_too_short(split, length)}")
    results: list[Result] = []
    bits = split.tokens / (math.log(2) * split.bytes)
    by_place = torch.zeros(0)
    rows = 0
    for times in TIMES:
        size = times * length
        there = split.rows(size)
        if not there:
            break
        rows = min(there, max(1, examples // times))
        total = torch.zeros(size, dtype=torch.float64)
        at_once = max(1, TOKENS_AT_ONCE // size)
        chosen = [there * i // rows for i in range(rows)]
        for begin in range(0, rows, at_once):
            tokens = torch.stack([torch.from_numpy(split.row(i, size)[0]) for i in chosen[begin : begin + at_once]])
            targets = tokens[:, 1:].to(folder.device)
            nats = functional.cross_entropy(
                folder.logits(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="none"
            )
            total += nats.view(targets.shape).double().sum(0).cpu()
        by_place = total / rows
        mean = by_place.mean().item()
        results.append(Result(folder.step, task, f"loss@{size}", mean, rows))
        results.append(Result(folder.step, task, f"bits_per_byte@{size}", mean * bits, rows))
    begin = 0
    cuts = [cut for cut in (length // 4, length // 2, *(times * length for times in TIMES)) if cut <= len(by_place)]
    for end in dict.fromkeys(filter(None, cuts)):
        value = by_place[begin:end].mean().item()
        results.append(Result(folder.step, task, f"loss_at_{begin}_to_{end}", value, rows))
        begin = end
    return results


def needle(folder: Folder, task: str, length: int, examples: int, filler: Split | None) -> list[Result]:
    """`exact_match`, the share of numbers that greedy decoding gets right, and `accuracy`, the share of their tokens
    that are right after the right ones before; at 1, 2 and 4 times the training's length.

    Raises `InputError` where even the longest text is too short for a needle and its question.
    """
    results: list[Result] = []
    for times in TIMES:
        right, tokens, whole, asked = 0, 0, 0, 0
        for question in questions(folder.encode, times * length, examples, filler=filler):
            ids = torch.tensor([question.tokens + question.answer[:-1]])
            guessed = folder.logits(ids, keep=len(question.answer))[0].argmax(-1).cpu()
            hits = int((guessed == torch.tensor(question.answer)).sum())
            asked, right, tokens = asked + 1, right + hits, tokens + len(question.answer)
            whole += hits == len(question.answer)
        if asked:
            results.append(Result(folder.step, task, f"exact_match@{times * length}", whole / asked, asked))
            results.append(Result(folder.step, task, f"accuracy@{times * length}", right / tokens, asked))
    if not results:
        raise InputError(f"task '{task}': {_no_room(length, filler)}")
    return results


def proxy(folder: Folder) -> list[Result]:
    """The metrics on the test split of the proxy task that the folder comes from, over as many batches as its trial.

    Raises `InputError` where it comes from none, or its vocabulary is another.
    """
    task = _proxy_task(folder)
    if isinstance(task, str):
        raise InputError(f"task 'proxy': {folder.named}: {task}")
    found = from_folder(folder.path)
    assert found.weights is not None
    model = Model(found.model)
    model.load_state_dict(dict(found.weights()))
    model.to(folder.device).eval()
    train = folder.recipe["trial"]["train"]
    sums: dict[str, tuple[float, float]] = {}
    evaluations = task.evaluations()
    for label, own in evaluations.items():
        ends = [f"@{label}" if label else "", *([] if "" in evaluations else [""])]
        rows, batches = task.evaluated(own, "test", train["batch_size"], train["eval_batches"])
        for i in range(batches):
            batch = own.batch("test", rows, EVALUATION_SEED, i, folder.device)
            with torch.no_grad():
                logits = model(batch.inputs, batch.targets != IGNORE)
            for name, (total, count) in own.measure(batch, logits.float()).items():
                for end in ends:
                    before = sums.get(name + end, (0.0, 0.0))
                    sums[name + end] = before[0] + total.item(), before[1] + count.item()
    return [
        Result(folder.step, f"proxy {task.name}", name, total / count, int(count))
        for name, (total, count) in sums.items()
        if count
    ]


def _of_harness(tasks: Sequence[str], include: Path | None) -> tuple[list[str], list[Path]]:
    """The names of tasks of lm-evaluation-harness, and the folders with YAML files of further ones.

    tasks: names and YAML files. Raises `InputError` without the package lm_eval, for a file or folder that cannot be
    read, and for a name that stands in none of the harness's files. That takes 1 s; its index takes 20 s of a core.
    """
    if not tasks:
        return [], []
    installed = find_spec("lm_eval")
    if installed is None:
        raise InputError(
            f"tasks {', '.join(tasks)} need lm-evaluation-harness: pip install 'deltalab[eval]'; ours are "
            f"{', '.join(OWN)}"
        )
    files = [Path(task).resolve() for task in tasks if task.endswith((".yaml", ".yml"))]
    named = [task for task in tasks if not task.endswith((".yaml", ".yml"))] + [_task_of(file) for file in files]
    if include is not None and not include.is_dir():
        raise InputError(f"{include}: no such folder of tasks")
    folders = [*dict.fromkeys([*([] if include is None else [include.resolve()]), *(file.parent for file in files)])]
    own = [Path(found) / "tasks" for found in installed.submodule_search_locations or ()]
    known, missing = set[str](), {task: re.compile(rf"(?<![\w-]){re.escape(task)}(?![\w-])") for task in named}
    for file in (file for folder in (*folders, *own) for file in folder.rglob("*.yaml")):
        text = file.read_text(encoding="utf-8", errors="replace")
        known.update(NAME.findall(text))
        missing = {task: word for task, word in missing.items() if not word.search(text)}
        if not missing:
            return named, folders
    raise _unknown(next(iter(missing)), sorted(known))


def harness(folder: Folder, named: Sequence[str], folders: Sequence[Path], *, limit: int | None) -> list[Result]:
    """Tasks of lm-evaluation-harness (Gao et al. 2024), by names; each metric of each task.

    folders: with YAML files of further tasks. Raises `InputError` without a tokenizer, for a task that there is not,
    and where a task's data cannot be had.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=list(map(str, folders)) or None)
    for task in named:
        if task not in manager.all_tasks:
            raise _unknown(task, manager.all_tasks)
    model = HFLM(
        pretrained=folder.model,
        tokenizer=folder.tokenizer,
        batch_size=8 if folder.device.type == "cuda" else 1,
        max_length=folder.length and TIMES[-1] * folder.length,
        device=str(folder.device),
    )
    try:
        found: Any = simple_evaluate(
            model, tasks=named, limit=limit, task_manager=manager, log_samples=False,
            bootstrap_iters=0,
        )  # fmt: skip
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"lm-evaluation-harness: {type(error).__name__}: {reason}") from error
    results = []
    for task, metrics in found["results"].items():
        count = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if not isinstance(value, int | float) or not kind or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{kind}")
            name = metric if kind == "none" else f"{metric} ({kind})"
            error_bar = float(stderr) if isinstance(stderr, int | float) else None
            results.append(Result(folder.step, task, name, float(value), count, error_bar))
    return results


def write(results: Sequence[Result], directory: Path, about: Mapping[str, Any]) -> Path:
    """Adds the results to `evaluations.json` of a folder, where each replaces an earlier one of its step and name."""
    file = directory / FILE
    found: list[dict[str, Any]] = []
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["evaluations"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{file}: is no file of evaluations; move it away") from None
    rows = {(row["step"], row["task"], row["metric"]): row for row in found}
    for result in results:
        value = result.value if math.isfinite(result.value) else None
        rows[result.step, result.task, result.metric] = {**asdict(result), "value": value, **about}
    partial = file.with_name(f".{FILE}.partial")
    partial.write_text(json.dumps({"evaluations": list(rows.values())}, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
    return file


def packed(folder: Path) -> Packed:
    """Packed data that a user names. Raises `InputError` where it is none."""
    try:
        return Packed(folder)
    except ValueError as error:
        raise InputError(str(error)) from None


def _trained_on(provenance: Mapping[str, Any]) -> Path | None:
    data = provenance.get("data")
    folder = Path(str(data.get("folder"))) if isinstance(data, Mapping) else None
    return folder if folder is not None and folder.is_dir() else None


def _proxy_task(folder: Folder) -> Task | str:
    """The proxy task that a folder comes from, or why its model cannot be asked it."""
    trial = folder.recipe.get("trial")
    if not isinstance(trial, Mapping):
        return "the model does not come from a study"
    load_rules(folder.path)
    vocabulary = int(_config(folder.path)["vocab_size"])
    try:
        task = get_task(trial["task"]["name"], **trial["task"]["parameters"])
    except InputError as error:  # such as for a task of a plugin that this machine lacks
        return str(error)
    if task.readout != "position":
        return f"task '{task.name}' asks for one answer at the end, and the model gives one at each position"
    if vocabulary != task.vocab_size:
        return f"the model's vocabulary has {vocabulary} ids now, and that of task '{task.name}' {task.vocab_size}"
    return task


def _too_short(split: Split, length: int) -> str:
    return f"the split has {split.tokens} tokens, and a row takes {length + 1}: give --length, or another --split"


def _no_room(length: int, filler: Split | None) -> str:
    or_else = "" if filler is None else ", or the split is too short to fill them"
    return f"a needle and its question do not fit into {TIMES[-1] * length} tokens{or_else}: give --length"


def _require_same_tokenizer(folder: Folder, data: Packed) -> None:
    own = folder.recipe.get("tokenizer")
    if isinstance(own, Mapping) and own.get("sha256") not in (None, data.tokenizer["sha256"]):
        raise InputError(
            f"{data.folder}: is packed with another tokenizer, '{data.tokenizer['name']}' of "
            f"{data.tokenizer['vocab_size']} ids, than {folder.named}: '{own.get('name', own.get('kind'))}' of "
            f"{own.get('vocab_size')}"
        )
    if data.tokenizer["vocab_size"] > int(_config(folder.path)["vocab_size"]):
        raise InputError(
            f"{data.folder}: has {data.tokenizer['vocab_size']} token ids, and the model of {folder.named} "
            f"{_config(folder.path)['vocab_size']}"
        )


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / "config.json")
        if config["model_type"] == "deltalab":
            return config
    except (OSError, InputError, KeyError):
        pass
    why = "neither a folder of `platform export` nor a run of `platform train`" if folder.is_dir() else "no such folder"
    raise InputError(f"{folder}: {why}")


def _task_of(file: Path) -> str:
    """The name of the task in one of the harness's YAML files, whose tags only the harness can read."""
    try:
        found = re.search(r"^(?:task|group):\s*(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if found is None:
        raise InputError(f"{file}: names no task: it has no line 'task: NAME'")
    return found[1].strip("\"'")


def _unknown(task: str, known: Sequence[str]) -> InputError:
    near = get_close_matches(task, [*OWN, *known], n=1)
    meant = f" did you mean '{near[0]}'?" if near else ""
    return InputError(
        f"unknown task '{task}';{meant} ours are {', '.join(OWN)}; `lm-eval ls tasks` lists the harness's"
    )


def fingerprint(folder: Path) -> str:
    """SHA-256 of the weights' files, by which an evaluation names what it measured."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as opened_file:
            while block := opened_file.read(2**20):
                digest.update(block)
    return digest.hexdigest()
