"""The proxy tasks: small, exactly defined problems that tell update rules apart in minutes."""

from deltalab.tasks.digits import Digits
from deltalab.tasks.images.digit_patches import DigitPatches
from deltalab.tasks.images.image_folder import ImageFolder
from deltalab.tasks.images.shapes import Shapes
from deltalab.tasks.mad.compression import Compression
from deltalab.tasks.mad.fuzzy_recall import FuzzyRecall
from deltalab.tasks.mad.in_context_recall import InContextRecall
from deltalab.tasks.mad.memorization import Memorization
from deltalab.tasks.mad.noisy_recall import NoisyRecall
from deltalab.tasks.mad.selective_copy import SelectiveCopy
from deltalab.tasks.mod_arithmetic import ModArithmetic
from deltalab.tasks.mqar import MQAR
from deltalab.tasks.niah import NIAH
from deltalab.tasks.parity import Parity
from deltalab.tasks.proxies.physics.brevo import Brevo
from deltalab.tasks.proxies.physics.depo import Depo
from deltalab.tasks.proxies.physics.lano import Lano
from deltalab.tasks.proxies.physics.mano import Mano
from deltalab.tasks.proxies.recall.compositional_mqar import CompositionalMQAR
from deltalab.tasks.proxies.recall.forgetting_mqar import ForgettingMQAR
from deltalab.tasks.proxies.recall.length_copy import LengthCopy
from deltalab.tasks.proxies.recall.needles import Needles
from deltalab.tasks.proxies.recall.variables import Variables
from deltalab.tasks.proxies.tracking.program_trace import ProgramTrace
from deltalab.tasks.proxies.tracking.selectiv import Selectiv
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, SPLITS, Batch, Task, surprisal
from deltalab.tasks.text import Text
from deltalab.tasks.word_problem import WordProblem

_MAD = (InContextRecall, NoisyRecall, FuzzyRecall, SelectiveCopy, Compression, Memorization)
_STATE_TRACKING = (Parity, ModArithmetic, WordProblem)
_RECALL = (ForgettingMQAR, CompositionalMQAR, Needles, Variables, LengthCopy)
_PHYSICS = (Depo, Brevo, Mano, Lano)
_IMAGES = (DigitPatches, Shapes, ImageFolder)
_PROXIES = (*_RECALL, *_PHYSICS, ProgramTrace, Selectiv)
BUILTIN: dict[str, type[Task]] = {
    task.name: task for task in (MQAR, NIAH, Text, Digits, *_MAD, *_STATE_TRACKING, *_PROXIES, *_IMAGES)
}

__all__ = ["BUILTIN", "IGNORE", "MQAR", "NIAH", "SPLITS", "Batch", "Random", "Task", "Text", "surprisal"]
