"""While a training runs, its bar shows what was spent, and in a notebook its table does."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from test_mixin import make
from transformers import ProgressCallback, TrainerCallback

from dp_transformers import DPTrainer, DPTrainingArguments
from dp_transformers.trainer.patches import PrivateProgress, show_spent


class Watch(TrainerCallback):
    """Keeps what the bar shows at each step, and what was logged."""

    def __init__(self):
        self.shown, self.logged = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append(logs)

    def on_step_end(self, args, state, control, **kwargs):
        self.shown.append(self.bar.training_bar.postfix)


@pytest.mark.parametrize(
    ("budget", "target"),
    [({"target_epsilon": 8.0, "noise_multiplier": None}, " of 8"), ({}, ""), ({"max_examples_per_person": 2}, "")],
)
def test_the_bar_shows_epsilon_and_its_target(tmp_path, budget, target):
    watch = Watch()
    trainer = make(
        DPTrainer, tmp_path, lambda **values: DPTrainingArguments(**{**values, **budget, "max_steps": 3, "disable_tqdm": False}), callbacks=[watch],
    )  # fmt: skip
    bars = [c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressCallback)]
    assert [type(bar) for bar in bars] == [PrivateProgress]
    watch.bar = bars[0]
    trainer.train()
    name = "epsilon_per_person" if "max_examples_per_person" in budget else "epsilon"
    spent = [logs[name] for logs in watch.logged if "loss" in logs]
    assert len(spent) == 3 and spent == sorted(spent)
    # a step's line of the log comes after its end
    assert watch.shown[1:] == [f"epsilon {epsilon:.3g}{target}" for epsilon in spent[:2]]


@pytest.fixture
def notebook(monkeypatch):
    """A notebook's display, which shows nothing."""
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda *args, **kwargs: SimpleNamespace(update=lambda html: None)
    ipython.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)
    yield
    sys.modules.pop("transformers.utils.notebook", None)


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_table_of_a_notebook_has_columns_for_epsilon(tmp_path, notebook, evaluates):
    from transformers.utils.notebook import NotebookProgressCallback

    changes = {"eval_strategy": "steps", "eval_steps": 1} if evaluates else {}
    changes |= {"max_examples_per_person": 2, "max_steps": 3}
    watch = Watch()
    watch.on_step_end = lambda *args, **kwargs: None
    trainer = make(
        DPTrainer, tmp_path, lambda **values: DPTrainingArguments(**{**values, **changes}), callbacks=[watch, NotebookProgressCallback],
    )  # fmt: skip
    show_spent(trainer)  # as in the construction of a trainer in a notebook
    (shown,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, NotebookProgressCallback)]
    assert type(shown).__name__ == "PrivateNotebookProgress"
    tables = []
    on_train_end = shown.on_train_end

    def keep(*args, **kwargs):
        tables.append(shown.training_tracker.inner_table)
        on_train_end(*args, **kwargs)

    shown.on_train_end = keep
    trainer.train()
    ((columns, *rows),) = tables
    assert "" not in columns and columns[-2:] == ["Epsilon", "Epsilon Per Person"]
    expected = [
        [logs["epsilon"], logs["epsilon_per_person"]]
        for logs in watch.logged
        if ("eval_loss" if evaluates else "loss") in logs
    ]
    assert len(rows) == 3 and [row[-2:] for row in rows] == expected
