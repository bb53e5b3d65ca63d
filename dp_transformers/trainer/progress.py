"""The progress bar of Trainer, and its table in a notebook, show what was spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import ProgressCallback, Trainer

_NAMES = ("epsilon", "epsilon_per_person")


def show_spent(trainer: Trainer) -> None:
    """Let the trainer's progress bar show ε beside its target, or its table in a notebook have columns for it."""
    replacements = {"ProgressCallback": lambda: PrivateProgress, "NotebookProgressCallback": private_notebook_progress}
    for callback in list(trainer.callback_handler.callbacks):
        name = type(callback).__name__
        if name in replacements and type(callback).__module__.startswith("transformers."):
            trainer.remove_callback(callback)
            trainer.add_callback(replacements[name]())


class PrivateProgress(ProgressCallback):
    """Trainer's bar, with ε behind it: of all rows of a person where a person may have several."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        spent = _spent(logs or {})
        if self.training_bar is not None and spent:
            target = "" if args.target_epsilon is None else f" of {args.target_epsilon:g}"
            self.training_bar.set_postfix_str(f"epsilon {list(spent.values())[-1]:.3g}{target}")


def private_notebook_progress() -> type:
    """Return Trainer's table for notebooks, with columns for ε. It can be made where IPython is installed."""
    from transformers.utils.notebook import NotebookProgressCallback

    class PrivateNotebookProgress(NotebookProgressCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            super().on_log(args, state, control, logs=logs, **kwargs)
            table = self.training_tracker
            if args.eval_strategy == "no" and table is not None and (spent := _spent(logs or {})):
                table.write_line({"Step": state.global_step, **{_title(name): value for name, value in spent.items()}})

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            # the title of a column is the name without what stands before its first underscore
            shown = {f"eval_{name}" if name in _NAMES else name: value for name, value in (metrics or {}).items()}
            super().on_evaluate(args, state, control, metrics=shown, **kwargs)

    return PrivateNotebookProgress


def _spent(logs: Mapping[str, float]) -> dict[str, float]:
    return {name: logs[name] for name in _NAMES if name in logs}


def _title(name: str) -> str:
    return " ".join(word.capitalize() for word in name.split("_"))
