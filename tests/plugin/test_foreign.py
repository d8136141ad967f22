"""Another repository, with this package installed and nothing configured."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
NUMPY = '''\
"""Adding in place saves an allocation."""

import numpy as np


def vectors(bench):
    n = bench.size(1 << 16, check=1000)
    return np.random.rand(n), np.random.rand(n)


def in_place(x, y):
    z = x + y
    z *= 2
    return z


def test_add(compare):
    compare(
        baseline=lambda x, y: (x + y) * 2,
        optimized=in_place,
        inputs=vectors,
        reference=lambda x, y: 2 * x + 2 * y,
    )


def test_of_their_own():
    assert vectors
'''


def test_the_readmes_example_is_checked(project):
    (example,) = re.findall(
        r"```python\n# test_addcmul\.py\n(.*?)```", README.read_text(), re.DOTALL
    )
    project.write("test_addcmul.py", example)
    project.run().assert_outcomes(passed=1)
    assert not (project.path / ".aiperf").exists()


def test_it_is_measured_on_the_host(project):
    project.write("test_add.py", NUMPY.replace("def test_add", "@pytest.mark.host\ndef test_add"))
    project.write("test_add.py", "import pytest\n" + (project.path / "test_add.py").read_text())
    done = project.pytester.runpytest_subprocess("--cpu", "--quick", "-pno:cacheprovider")
    done.stdout.fnmatch_lines(["add (cpu)", "  add *µs*", "1 claim: *"])
    (record,) = project.results().values()
    assert record["claim"] == "add/add"
    assert record["outcome"] in ("PASSED", "FAILED")  # depends on the host
    assert record["verdict"]


def test_it_is_measured_on_a_gpu_and_their_other_tests_are_not_run(project):
    spending = "    from tests.fake_gpu import spend\n    spend({} * 1e-6)\n"
    text = NUMPY.replace("    z = x + y\n", spending.format(100) + "    z = x + y\n")
    text = text.replace("baseline=lambda x, y: (x + y) * 2", "baseline=twice")
    project.write(
        "test_add.py",
        text + f"\n\ndef twice(x, y):\n{spending.format(200)}    return (x + y) * 2\n",
    )
    done = project.run("--gpu")
    done.assert_outcomes(passed=1, deselected=1)
    done.stdout.fnmatch_lines(["add (fake)", "  add *µs*µs*x *FASTER*"])


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_project_that_does_not_use_the_plugin_is_left_alone(project, workers):
    project.write(
        "test_theirs.py", "import os\ndef test_it(tmp_path): assert not os.listdir(tmp_path)"
    )
    done = project.pytester.runpytest_subprocess("-pno:cacheprovider", workers)
    done.assert_outcomes(passed=1)
    assert not (project.path / ".aiperf").exists()
