"""A trainer with an evaluation of its own, in a module of its own, as run_qa has one."""

from transformers import Trainer


class QuestionAnsweringTrainer(Trainer):
    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples, self.post_process = eval_examples, post_process_function

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(
                self.get_eval_dataloader(rows), description="Evaluation", ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )  # fmt: skip
        finally:
            self.compute_metrics = compute_metrics
        answers = self.post_process(self.eval_examples if eval_examples is None else eval_examples, output.predictions)
        found = {f"{metric_key_prefix}_{name}": value for name, value in self.compute_metrics(answers).items()}
        metrics = {**found, **output.metrics}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
