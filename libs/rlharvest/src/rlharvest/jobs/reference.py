"""The reference of a job's fields: `python -m rlharvest.jobs.reference > docs/job.md`.

A contract test holds the committed file to what this prints; another one parses its examples.
"""

from __future__ import annotations

from pydantic import BaseModel

from rlharvest import fields
from rlharvest.jobs.aliases import ALIASES
from rlharvest.jobs.model import JobSpec

HEAD = """\
# The job file

<!-- Made by `python -m rlharvest.jobs.reference > docs/job.md`; edit rlharvest/jobs/model.py and reference.py. -->

A job is one mapping, in YAML or JSON. `rlharvest submit JOB.yaml` sends a file, `POST /v1/jobs` takes the same mapping as
`application/json` or `application/yaml`. Three fields are required: `model`, `dataset` with its `path`, and at least one
reward. Everything else has a default.

- An unknown key is refused at every level; the error names the nearest known one.
- A name with dots is the same as nested blocks: `sampling.temperature: 0.7`. So is `--set sampling.temperature=0.7` of
  `rlharvest submit`, which goes over what the file says.
- Relative paths in a file are relative to the file. With `--as-is`, and over REST, they are sent as written and looked for
  under the server's roots (`--root` of `rlharvest up`, `RLHARVEST_ROOTS` elsewhere). A path outside of the roots is refused.
- What can be wrong with model, dataset and rewards is found while the job is `validating`, before a worker is touched.

## Two complete examples

"""

SMALL = """\
model: my-model                     # a Hugging Face directory: config, tokenizer, safetensors
dataset: {path: train.jsonl}        # rows such as {"question": "12+7", "answer": "19"}
rewards: [{builtin: numeric}]
sampling: {num_generations: 8, max_completion_length: 256}
algorithm: {prompts_per_step: 16, learning_rate: 1.0e-6}
staleness: {max_staleness: 1}
checkpoint: {every_steps: 10}
limits: {max_steps: 100}
"""

LARGE = """\
name: sums-with-a-length-penalty
model: models/my-model
tokenizer: models/my-model
seed: 7
metadata: {owner: ada, ticket: "17"}

dataset:
  path: reasoning-gym:chain_sum       # prompts are generated; no file is needed
  size: 2000
  params: {min_terms: 2, max_terms: 4}
  system_prompt: Answer with the number alone.
  apply_chat_template: true
  max_prompt_length: 256

rewards:                              # a response's reward is the weighted sum
  - builtin: numeric
    weight: 1.0
  - path: rewards.py                  # def short(completions, **columns): return [...]
    name: short
    style: trl
    weight: 0.1
    timeout_s: 2
    memory_mb: 512
    params: {most: 200}

sampling:
  num_generations: 16
  max_completion_length: 512
  temperature: 1.0
  stop: ["</answer>"]

algorithm:
  name: grpo
  prompts_per_step: 32
  learning_rate: 2.0e-6
  lr_schedule: cosine
  warmup_steps: 10
  epsilon: 0.2
  epsilon_high: 0.28
  beta: 0.001                         # above 0: a frozen reference model is kept
  mask_truncated_completions: true
  micro_batch_tokens: 16384
  dtype: bfloat16

staleness:
  max_staleness: 2                    # rollout runs at most two optimizer steps ahead
  on_stale: mask

rollout:
  engine: torch
  dtype: bfloat16
  progress_deadline_s: 120
  kv: keep

weights: {keep_versions: 8}
checkpoint: {every_steps: 20, keep: 3}
limits: {max_steps: 500, max_reward_errors: 100}
"""

REWARDS = """\
## Reward functions

A reward is a built-in function or one of a Python file. `style: auto` looks at the parameters of the function.

| style | the function | what it gets |
| --- | --- | --- |
| `trl` | `def reward(completions, **columns)` | lists of length 1: `prompts`, `completions`, `completion_ids`, every \
column of the row by its name; besides `trainer_state` and `params` |
| `verl` | `def compute_score(data_source, solution_str, ground_truth, extra_info)` | the row's columns, and `params` |

It returns a number (`trl`: a list of one). `None` says nothing about the response; only when all functions return `None`
is that an error. An exception, a time-out, NaN, a wrong length or type is an error: the sample is shown in the job's events
(`rlharvest events JOB`), its group is dropped and replaced, and after `limits.max_reward_errors` such responses the job
fails. Nothing is trained as zero in silence.

| built-in | reward | params |
| --- | --- | --- |
| `exact_match` | 1 if the completion is the ground truth, white space at both ends aside | `ignore_case` |
| `numeric` | 1 if the final answer equals the ground truth as a number or a mathematical expression | `tolerance` |
| `regex` | 1 if the pattern is found | `pattern`, required |
| `reasoning_gym` | what the task's own verifier says | `task` |

## Shapes of data

`dataset.format: auto` goes by the columns of the first row.

| format | columns |
| --- | --- |
| `verl` | `prompt`, and `reward_model` or `reward_spec` with `ground_truth` in it |
| `trl` | `prompt`, and any others |
| `messages` | `messages` as OpenAI has them; the assistant's turns at the end are not part of the prompt |
| `question-answer` | `question`, `problem`, `instruction` or `input`; with `answer`, `solution`, `output`, `label` or \
`ground_truth` |

With `prompt_key`, and `label_key` if there is a right answer, any other names do. Rewards get every column but the prompt,
and the right answer as `ground_truth`.

## Names that other tools use

These are taken too, nested or with dots. Naming a field twice with two values is refused.

"""


def text() -> str:
    """Return the whole reference as Markdown."""
    parts = [HEAD, "The least that is useful:\n\n", _yaml(SMALL), "\nMost fields, set:\n\n", _yaml(LARGE)]
    parts += ["\n## Fields\n\n### Top level\n\n", _table(JobSpec, "")]
    parts += _blocks(JobSpec, "")
    rows = [(f"`{alias}`", f"`{ours}`") for alias, ours in ALIASES.items()]
    parts += ["\n", REWARDS, fields.table(("theirs", "ours"), rows)]
    return "".join(parts)


def _blocks(model: type[BaseModel], within: str) -> list[str]:
    """Return the sections of a model's blocks, and of theirs."""
    parts = []
    for field in fields.of(model, {}):
        if field.block is not None:
            name = within + field.name
            path = f"{name}[]." if field.kind.startswith("list") else f"{name}."
            parts += [f"\n### `{name}`\n\n{field.block.__doc__}\n\n", _table(field.block, path)]
            parts += _blocks(field.block, path)
    return parts


def _yaml(example: str) -> str:
    return f"```yaml\n{example}```\n"


def _table(block: type[BaseModel], path: str) -> str:
    rows = []
    for field in fields.of(block, {}):
        meaning = field.meaning or (f"See [`{field.name}`](#{field.name}) below." if field.block is not None else "")
        shown = f"{field.kind}, {field.bounds}" if field.bounds else field.kind
        rows.append((f"`{path}{field.name}`", shown, field.default or "**required**", meaning))
    return fields.table(("field", "type and bounds", "default", "meaning"), rows)


if __name__ == "__main__":
    print(text(), end="")
