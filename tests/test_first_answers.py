"""The first answers of a fresh process: few programs are compiled, and none for an ε.

The limits on processor time are several times what an idle machine needs.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole

HERE = Path(__file__).parent
COUNT = """
import json, sys, time
import jax, jax.monitoring, optax
programs = []
def listen(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        programs.append(duration)
jax.monitoring.register_event_duration_secs_listener(listen)
start = time.process_time()
"""
REPORT = """
print(json.dumps([len(programs), time.process_time() - start]), file=sys.stderr)
"""
ANSWERS = {
    "import": ("import dpjax; dpjax.plan", 0, 2.0),
    "epsilon": (
        "from dpjax import Adjacency\n"
        "from dpjax.accounting import pld\n"
        "step = pld.poisson_gaussian(0.9, 0.01, adjacency=Adjacency.ADD_REMOVE)\n"
        "pld.epsilon(pld.compose(step, 1000), 1e-5)",
        3,
        5.0,
    ),
    "plan": (
        "import dpjax\n"
        "sizes = dict(num_examples=60_000, batch_size=256, num_steps=4_700)\n"
        "dpjax.plan(**sizes, epsilon=2.0, delta=1e-6, clip_norm=1.0)",
        8,
        10.0,
    ),
}


def run_and_count(program):
    """The number of programs compiled by a fresh process, and its processor time."""
    script = COUNT + program + REPORT
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=HERE.parent
    )
    return json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("name", ANSWERS)
def test_first_answer_compiles_few_programs(name):
    program, most_programs, most_seconds = ANSWERS[name]
    programs, seconds = run_and_count(program)
    assert programs <= most_programs
    assert seconds <= most_seconds


def test_readme_program_compiles_few_programs():
    page = (HERE.parent / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    programs, seconds = run_and_count(program)
    assert programs <= 45
    assert seconds <= 30
