"""The programs on the first page and on the pages of concepts."""

import pathlib

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PRINTED = {
    "index": ["13.21, -4.17"],
    "concepts/adjacency": ["ADD_REMOVE: ε = 1.83", "REPLACE: ε = 2.8"],
    "concepts/clipping": ["norms [5.  0.5] sum [1.1 0.8]", "sensitivity 2.0"],
    "concepts/noise": ["μ = 1.0: ε = 4.38 at δ = 1e-5, 26% found"],
    "concepts/composition": ["1600 steps: 16% and 16%", "ε = 1.9"],
    "concepts/amplification": ["poisson: noise multiplier", "fixed: noise multiplier"],
}


@pytest.mark.whole
@pytest.mark.parametrize("name", PRINTED)
def test_programs_on_the_page_print_expected_output(name, capsys):
    names = {}
    for program in (DOCS / f"{name}.md").read_text().split("```python\n")[1:]:
        exec(compile(program.split("```")[0], f"{name}.md", "exec"), names)
    printed = capsys.readouterr().out
    for words in PRINTED[name]:
        assert words in printed
