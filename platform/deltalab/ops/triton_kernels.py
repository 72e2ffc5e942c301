"""The Triton kernels as entries of `backends.Kernels`: the only module that imports them.

`backends` loads this module by name on first use, because Triton starts slowly.
"""

from deltalab.kernels import carry, dispatch, interpreter, ptxas
from deltalab.kernels.register import eager
from deltalab.kernels.ridge import op as ridge
from deltalab.kernels.step import adamw, convolution, embedding, loss, norm, random, swiglu
from deltalab.kernels.tokens import elementwise, lstm
from deltalab.ops.backends import Kernels

interpreter.mend()

KERNELS = Kernels(
    triton=True,
    scan=dispatch.scan,
    takes=dispatch.takes,
    regression=ridge.regression,
    carry=carry.carries,
    elementwise=elementwise.scan,
    lstm=lstm.scan,
    rms_norm=eager(norm.rms_norm),
    convolve=eager(convolution.convolve),
    swiglu=eager(swiglu.swiglu),
    embed=eager(embedding.embed),
    cross_entropy=loss.cross_entropy_,
    adamw=adamw.adamw_,
    integers=random.integers,
    exponential=random.exponential,
    distinct=random.distinct,
    most_distinct=random.WIDEST,
)


def lacks_assembler() -> str | None:
    """Makes Triton use a ptxas that compiles correctly, or returns what the user must provide if there is none."""
    return ptxas.choose()
