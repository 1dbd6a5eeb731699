"""train.compile in whole runs: resumed exactly, and near the run that does without."""

import deadly
import evidence
import pytest

COMPILED = ["train.compile=true", "optim.schedule=constant"]


def execute(processes, *arguments):
    process = processes.Process(target=deadly.run, args=arguments)
    process.start()
    process.join(300)
    assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_compiled_run_resumes_exactly_and_learns_alike(processes, write_run, activations):
    values = {"memory__activations": activations, "model__dtype": "fp32"}
    plain, whole, resumed = (write_run(name, **values) for name in ("plain", "whole", "resumed"))
    execute(processes, plain, ["optim.schedule=constant"])
    execute(processes, whole, COMPILED)
    execute(processes, resumed, [*COMPILED, "train.steps=4"])
    execute(processes, resumed, COMPILED)
    assert evidence.weights(resumed) == evidence.weights(whole)
    assert evidence.states(resumed) == evidence.states(whole)
    assert evidence.weights(whole) != evidence.weights(plain), "nothing was compiled"
    for ours, theirs in zip(evidence.metrics(whole), evidence.metrics(plain), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
