"""The proxy tasks: small, exactly defined problems on which update rules can be told apart in minutes."""

from deltalab.tasks.mqar import MQAR
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, SPLITS, Batch, Task, surprisal
from deltalab.tasks.text import Text

BUILTIN: dict[str, type[Task]] = {task.name: task for task in (MQAR, Text)}

__all__ = ["BUILTIN", "IGNORE", "MQAR", "SPLITS", "Batch", "Random", "Task", "Text", "surprisal"]
