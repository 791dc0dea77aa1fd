"""The programs on the pages of concepts, and that their pictures are drawn."""

import pathlib

import pytest

CONCEPTS = pathlib.Path(__file__).parent.parent / "docs/concepts"
PRINTED = {
    "adjacency": ["ADD_REMOVE: ε = 1.83", "REPLACE: ε = 2.8"],
    "clipping": ["norms [5.  0.5] sum [1.1 0.8]", "sensitivity 2.0"],
    "noise": ["μ = 1.0: ε = 4.38 at δ = 1e-5, 26% found"],
    "composition": ["100 steps: 40% and 40%", "1600 steps: 16% and 16%", "ε = 1.9"],
    "amplification": ["poisson: noise multiplier", "fixed: noise multiplier"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_the_programs_on_the_page_run(name, capsys):
    names = {}
    for program in (CONCEPTS / f"{name}.md").read_text().split("```python\n")[1:]:
        exec(compile(program.split("```")[0], f"{name}.md", "exec"), names)
    printed = capsys.readouterr().out
    for words in PRINTED[name]:
        assert words in printed
