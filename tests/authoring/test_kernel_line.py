"""The line that says whether a rule has kernels, in the card, after the checks and beside timings on a CPU."""

import pytest
from typer.testing import CliRunner

import deltalab
from deltalab.authoring.kernel_line import kernel_line
from deltalab.cli.app import app
from deltalab.structure import DPLR


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("comba", "forward and backward: the kernels of a scalar decay"),
        ("erase_then_delta", "forward and backward: the kernels of a decay by channel"),
        ("q_delta", "forward and backward: the kernels of a decay by channel"),  # of a free low rank
        ("gsa", "forward and backward: those of its passes"),
        ("gka", "forward and backward: its own"),
        ("kalman", "none: the rule is outside the algebra and brings no kernel of its own"),
        ("based", "none: the Triton kernels take q and k with K up to 256, not 2145"),
    ],
)
def test_line_says_which_kernels_a_rule_has(name: str, line: str) -> None:
    assert kernel_line(deltalab.get_rule(name)) == line


def test_line_holds_for_the_sizes_that_are_asked_for() -> None:
    assert kernel_line(deltalab.get_rule("based"), key_dim=16).startswith("forward and backward")
    assert kernel_line(deltalab.get_rule("gated_oja"), value_dim=512) == (
        "none: the Triton kernels take keys of width up to 256, not 512"
    )


def test_line_names_what_the_structure_lacks() -> None:
    rule = type(deltalab.get_rule("rdn"))(transition=DPLR, output="sum")
    assert kernel_line(rule) == "none: a second state over a diagonal decay or a free low rank has no Triton kernel"


def test_commands_print_the_line() -> None:
    shown = CliRunner().invoke(app, ["rule", "show", "kalman", "--json"])
    assert '"kernels": "none: the rule is outside the algebra' in shown.stdout
    timed = CliRunner().invoke(app, ["rule", "bench", "retnet", "--shape", "1,8,1,4,4"])
    assert "retnet: Triton kernels forward and backward: the kernels of a scalar decay" in timed.output
