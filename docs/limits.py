"""The table of all limits: `python docs/limits.py > docs/limits.md`. A contract test holds the file to the code.

Every value is read from where the code reads it, and every limit names the test that reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from rlharvest import bus, fields, rpc, rpc_faults
from rlharvest.cli import spec as cli_spec
from rlharvest.jobs import model
from rlharvest.local import launcher
from rlharvest.weights import manifest, safetensors_check
from rlharvest_coordinator import batches, courier, harvest, registration, run
from rlharvest_coordinator.api import context, guard, streams
from rlharvest_coordinator.api import jobs as api_jobs
from rlharvest_coordinator.api.routes import jobs as api_jobs_routes
from rlharvest_coordinator.data import reward_files, rows
from rlharvest_coordinator.gateway import request as gateway
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_reward import builtin, fault, frames, limits
from rlharvest_rollout.settings import RolloutSettings
from rlharvest_trainer.settings import TrainerSettings
from rlharvest_weights import versions
from rlharvest_weights.settings import WeightSettings

HEAD = """\
# Limits

<!-- Made by `python docs/limits.py > docs/limits.md`; edit that file, or the code that has the limit. -->

Whatever can be given to rlharvest is bounded. What exceeds a bound is refused with one error that names the field, the
value, the limit and the fix; nothing that was there is lost by it. The bounds of a job's own fields are in
[job.md](job.md), those of settings in [settings.md](settings.md); a bound with a setting's name is changed by it.

"""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: what, how much (read from the code), what happens beyond it, and the test that goes there."""

    what: str
    most: str
    beyond: str
    test: str


def _bytes(n: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n >= 1 << shift and n % (1 << shift) == 0:
            return f"{n >> shift} {unit}"
    return f"{n} bytes"


def _count(n: int) -> str:
    return f"{n:,}".replace(",", " ")


def _default(settings: type[BaseModel], name: str) -> Any:
    return settings.model_fields[name].default


def _bound(block: type[BaseModel], name: str) -> str:
    """Return the greatest value of a field of the job."""
    (most,) = (item.le for item in block.model_fields[name].metadata if hasattr(item, "le"))
    return _count(most)


def _length(block: type[BaseModel], name: str) -> int:
    (most,) = (item.max_length for item in block.model_fields[name].metadata if hasattr(item, "max_length"))
    return int(most)


def _setting(settings: type[BaseModel], name: str, shown: Any = _count) -> str:
    return f"{shown(_default(settings, name))} (`RLHARVEST_{name.upper()}`)"


API = "tests/integration/api/test_limits.py::"
JOB = "tests/unit/jobs/test_limits.py::"
DATA = "tests/unit/data/"
FULL = "tests/chaos/test_full.py::"
GATEWAY = "tests/integration/api/test_gateway.py::"
ASKS = "tests/unit/gateway/test_request.py::"

SECTIONS: tuple[tuple[str, tuple[Limit, ...]], ...] = (
    (
        "REST and gRPC",
        (
            Limit(
                "body of a request",
                _bytes(guard.MAX_BODY_BYTES),
                "413 `payload_too_large`",
                "tests/integration/api/test_guard.py::test_a_large_body_is_cut_off",
            ),
            Limit(
                "first line and headers of a request",
                _bytes(guard.HEAD_BYTES),
                "431 `head_too_large`",
                f"{API}test_a_head_over_the_limit_is_answered_by_name_however_it_arrives",
            ),
            Limit(
                "gRPC message",
                _bytes(rpc.MAX_MESSAGE_BYTES),
                "`RESOURCE_EXHAUSTED`",
                "tests/unit/library/test_rpc.py::test_a_message_over_the_limit_is_refused_and_the_server_goes_on",
            ),
            Limit(
                "details of a gRPC error",
                f"{_count(rpc_faults.MAX_DETAILS)} characters",
                "cut off",
                "tests/unit/library/test_rpc.py::test_details_are_cut_to_what_a_trailer_holds",
            ),
            Limit(
                "unfinished jobs",
                _setting(CoordinatorSettings, "most_jobs"),
                "429 `limit_reached`, Retry-After",
                f"{API}test_more_unfinished_jobs_than_allowed_are_refused_until_one_ends",
            ),
            Limit(
                "event streams (SSE)",
                _setting(CoordinatorSettings, "most_streams"),
                f"503, Retry-After {streams.RETRY_AFTER_S}",
                f"{API}test_a_stream_too_many_is_refused_with_retry_after_and_places_come_back",
            ),
            Limit(
                "rows of a list",
                f"{_count(context.MOST_ROWS)} a page",
                "400 `invalid_value`",
                f"{API}test_pages_and_curves_are_bounded",
            ),
            Limit(
                "points of a curve",
                f"{_count(api_jobs_routes.MOST_POINTS)}; {_count(api_jobs_routes.POINTS)} unless `max_points` is given",
                "400; thinned out",
                f"{API}test_pages_and_curves_are_bounded",
            ),
            Limit(
                "`Idempotency-Key`",
                f"{api_jobs.KEY_LENGTH} characters",
                "400 `invalid_value`",
                f"{API}test_a_key_is_bounded",
            ),
            Limit(
                "job file of `rlharvest submit`",
                _bytes(cli_spec.MOST_BYTES),
                "exit 2",
                "tests/unit/cli/test_spec.py::test_a_file_over_the_limit_is_refused",
            ),
        ),
    ),
    (
        "A job",
        (
            Limit(
                "responses of a prompt (`sampling.num_generations`)",
                _bound(model.Sampling, "num_generations"),
                "400",
                f"{JOB}test_every_bound_is_refused",
            ),
            Limit(
                "groups of a batch (`algorithm.prompts_per_step`)",
                _bound(model.Algorithm, "prompts_per_step"),
                "400",
                f"{JOB}test_every_bound_is_refused",
            ),
            Limit(
                "tokens of a prompt (`dataset.max_prompt_length`)",
                _bound(model.Dataset, "max_prompt_length"),
                "400; longer prompts are left out and counted",
                f"{JOB}test_every_bound_is_refused",
            ),
            Limit(
                "tokens of a response (`sampling.max_completion_length`)",
                _bound(model.Sampling, "max_completion_length"),
                "400",
                f"{JOB}test_every_bound_is_refused",
            ),
            Limit(
                "num_generations x max_completion_length",
                f"{_count(model.MOST_GROUP_TOKENS)} tokens",
                "400",
                f"{JOB}test_products_of_fields_are_bounded",
            ),
            Limit(
                "prompts_per_step x num_generations x (max_staleness + 1)",
                f"{_count(model.MOST_LIVE_RESPONSES)} live responses",
                "400",
                f"{JOB}test_products_of_fields_are_bounded",
            ),
            Limit(
                "max_steps x prompts_per_step x num_generations",
                f"{_count(model.MOST_RESPONSES)} responses",
                "400",
                f"{JOB}test_products_of_fields_are_bounded",
            ),
            Limit(
                "stop strings",
                f"{_length(model.Sampling, 'stop')} of {model.MOST_STOP_CHARACTERS} characters",
                "400",
                f"{JOB}test_every_bound_is_refused",
            ),
            Limit(
                "metadata",
                f"{_length(model.JobSpec, 'metadata')} keys of {model.MOST_KEY_CHARACTERS}, values of "
                f"{model.MOST_VALUE_CHARACTERS} characters",
                "400",
                f"{JOB}test_every_bound_is_refused",
            ),
            Limit("every other field", "see [job.md](job.md)", "400", f"{JOB}test_no_field_of_a_job_is_unbounded"),
        ),
    ),
    (
        "Completions of the gateway",
        (
            Limit(
                "responses that are sampled at a time",
                _setting(CoordinatorSettings, "most_completions"),
                "429, Retry-After",
                f"{GATEWAY}test_more_at_a_time_than_allowed_are_refused_with_when_to_come_again",
            ),
            Limit(
                "tokens of a prompt and its completion",
                "the context of the job's model",
                "400",
                f"{ASKS}test_a_prompt_and_its_completion_fit_into_the_context",
            ),
            Limit(
                "prompts x n x max_tokens",
                f"{_count(model.MOST_GROUP_TOKENS)} tokens",
                "400",
                f"{ASKS}test_a_prompt_and_its_completion_fit_into_the_context",
            ),
            Limit(
                "prompts of a request, and n",
                f"{gateway.MOST_CHOICES} each",
                "400",
                f"{ASKS}test_values_out_of_bounds_are_refused_by_name",
            ),
            Limit(
                "stop strings",
                f"{gateway.MOST_STOPS} of {gateway.MOST_STOP_CHARACTERS} characters",
                "400",
                f"{ASKS}test_values_out_of_bounds_are_refused_by_name",
            ),
        ),
    ),
    (
        "Datasets and files of jobs",
        (
            Limit(
                "rows of a dataset",
                _count(rows.Limits().rows),
                "the job fails by name",
                f"{DATA}test_sources.py::test_size_takes_the_first_rows_and_too_many_are_refused",
            ),
            Limit(
                "a row",
                _bytes(rows.Limits().row_bytes),
                "the job fails, with file and line",
                f"{DATA}test_jsonlines.py::test_what_cannot_be_read_is_refused_with_its_line",
            ),
            Limit(
                "a .json file, which is read as a whole",
                _bytes(rows.Limits().json_bytes),
                "the job fails by name",
                f"{DATA}test_jsonlines.py::test_an_array_over_the_limit_is_refused_with_the_way_out",
            ),
            Limit(
                "a reward file",
                _bytes(reward_files.MOST_BYTES),
                "the job fails by name",
                f"{DATA}test_reward_files.py::test_a_file_over_the_limit_is_refused",
            ),
        ),
    ),
    (
        "Messages and workers",
        (
            Limit(
                "NATS message",
                _bytes(bus.MAX_PAYLOAD_BYTES),
                "split, or sent by reference",
                "tests/unit/rollout/test_buffer.py::test_a_message_never_exceeds_the_room_and_one_long_response_is_split",
            ),
            Limit(
                "prompt and prefix inside an assignment",
                f"{_bytes(courier.INLINE_BYTES)} of {_bytes(courier.MESSAGE_BYTES)} a message",
                "the worker fetches them over gRPC",
                "tests/integration/rollout/test_worker_process.py::"
                "test_a_prefix_is_fetched_when_the_assignment_names_it_only",
            ),
            Limit(
                "question for a reward",
                _bytes(bus.MAX_PAYLOAD_BYTES - harvest.HEADROOM_BYTES),
                "the group is dropped and replaced, event `group.too_large`",
                "tests/chaos/test_bad_input.py::"
                "test_a_row_too_large_for_any_message_drops_its_group_and_the_job_goes_on",
            ),
            Limit(
                "changes of a transition",
                _count(run.MOST_CHANGES),
                "the next round",
                "tests/unit/coordinator/test_limits.py::test_a_transition_of_the_most_changes_fits_into_a_message",
            ),
            Limit(
                "groups of a reply to the trainer",
                f"{_bytes(batches.REPLY_BYTES)}, then it asks for the rest",
                "the rest comes next",
                "tests/unit/coordinator/test_limits.py::test_a_reply_with_the_largest_group_fits_into_a_grpc_message",
            ),
            Limit(
                "workers",
                _setting(CoordinatorSettings, "most_workers"),
                "`RESOURCE_EXHAUSTED`; the worker tries again",
                "tests/integration/coordinator/test_roster.py::test_a_worker_too_many_is_told_so_and_joins_later",
            ),
            Limit(
                "slots, engines and texts of a worker",
                f"{_count(registration.MAX_SLOTS)}, {registration.MAX_ENGINES}, {registration.MAX_TEXT} characters",
                "`INVALID_ARGUMENT`",
                "tests/integration/coordinator/test_roster.py::test_what_a_worker_says_of_itself_is_bounded",
            ),
            Limit(
                "tokens that a worker keeps until the ledger has them",
                _setting(RolloutSettings, "buffer_tokens"),
                "generation pauses",
                "tests/integration/rollout/test_worker_process.py::"
                "test_dead_acknowledgements_pause_generation_and_cost_no_token",
            ),
            Limit(
                "the ledger's stream",
                _bytes(bus.STREAMS[bus.LEDGER].max_bytes or 0),
                "reason `LedgerFull`; workers wait",
                f"{FULL}test_a_full_stream_makes_everybody_wait_and_loses_no_token",
            ),
            Limit(
                "the ledger's store",
                "its maxmemory",
                "reason `LedgerStoreFull`; the coordinator waits",
                f"{FULL}test_a_store_at_its_maxmemory_makes_the_keeper_wait",
            ),
            Limit(
                "workers of `rlharvest up`",
                _count(launcher.MOST_WORKERS),
                "exit 2",
                "tests/integration/local/test_launcher.py::test_scale_adds_workers_and_lets_the_last_ones_leave_in_order",
            ),
        ),
    ),
    (
        "Weights and checkpoints",
        (
            Limit(
                "a file of a version",
                _setting(WeightSettings, "max_blob_bytes", _bytes),
                "refused before it is sent; 413",
                "tests/unit/weights/test_versions.py::test_a_file_over_the_limit_is_refused_before_it_is_sent",
            ),
            Limit(
                "files of a version",
                _count(manifest.MOST_FILES),
                "`INVALID_ARGUMENT`",
                "tests/unit/weights/test_manifest.py::test_a_version_of_too_many_files_is_refused",
            ),
            Limit(
                "a manifest",
                _bytes(manifest.MANIFEST_BYTES),
                "`INVALID_ARGUMENT`",
                "tests/integration/weights/test_publish_and_pull.py::test_a_manifest_over_the_limit_is_refused",
            ),
            Limit(
                "the header of a safetensors file",
                _bytes(safetensors_check.MAX_HEADER_BYTES),
                "the file is refused",
                "tests/unit/weights/test_safetensors_check.py::test_broken_files_are_named_with_their_sizes",
            ),
            Limit(
                "versions of a job at a time",
                _count(versions.MOST_VERSIONS),
                "`RESOURCE_EXHAUSTED`",
                "tests/unit/weights/test_versions.py::test_keys_and_numbers_of_versions_are_bounded",
            ),
            Limit(
                "the key of a publication",
                f"{versions.MOST_KEY_CHARACTERS} characters",
                "`INVALID_ARGUMENT`",
                "tests/unit/weights/test_versions.py::test_keys_and_numbers_of_versions_are_bounded",
            ),
            Limit(
                "uploads at a time",
                _setting(WeightSettings, "most_uploads"),
                "503, Retry-After; tried again",
                "tests/unit/weights/test_blobs.py::test_more_uploads_at_a_time_than_allowed_are_refused",
            ),
            Limit(
                "space of the coordinator's data directory for a dataset",
                "its disk",
                "reason `CoordinatorDiskFull`; the job waits",
                "tests/e2e/test_fleet.py::"
                "test_a_coordinator_without_room_for_the_dataset_says_so_and_takes_the_job_up_later",
            ),
            Limit(
                "space that publications leave on the weight service's disk",
                _setting(WeightSettings, "min_free_bytes", _bytes),
                "507; reason `WeightsDiskFull`; the trainer waits",
                f"{FULL}test_a_full_disk_of_the_weight_service_makes_the_trainer_wait",
            ),
            Limit(
                "space that checkpoints leave on their disk",
                _setting(TrainerSettings, "min_free_bytes", _bytes),
                "reason `CheckpointDiskFull`; the trainer waits",
                f"{FULL}test_a_full_disk_of_the_checkpoints_makes_the_trainer_wait",
            ),
            Limit(
                "space that a version leaves on the trainer's own disk",
                _setting(TrainerSettings, "min_free_bytes", _bytes),
                "reason `TrainerDiskFull`; the trainer waits",
                "tests/integration/trainer/test_run.py::test_a_full_disk_of_its_own_is_waited_for_by_name",
            ),
        ),
    ),
    (
        "Rewards",
        (
            Limit(
                "memory and time of a call",
                "`rewards[].memory_mb`, `rewards[].timeout_s`",
                "its process is killed, event `group.reward_error`",
                "tests/integration/reward/test_process.py::test_what_does_not_end_well_is_killed_with_all_it_started",
            ),
            Limit(
                "a file that a function writes",
                _bytes(limits.MAX_FILE_BYTES),
                "the call fails",
                "tests/integration/reward/test_process.py::test_a_file_over_the_limit_fails_the_call",
            ),
            Limit(
                "a call and its answer",
                _bytes(frames.MAX_FRAME_BYTES),
                "the call fails",
                "tests/unit/reward/test_frames.py::test_what_is_no_frame_is_refused",
            ),
            Limit(
                "an expression of `numeric`",
                f"{_count(builtin.MAX_EXPRESSION)} characters",
                "no number",
                "tests/unit/reward/test_answers.py::test_what_is_not_one_number_is_refused",
            ),
            Limit(
                "what an error shows",
                f"{_count(fault.MAX_MESSAGE)} characters",
                "cut off",
                "tests/unit/reward/test_scoring.py::test_shortened_text_is_valid_and_short",
            ),
            Limit(
                "processes",
                "cores, at least 2 (`RLHARVEST_PROCESSES`)",
                "calls wait",
                "tests/unit/reward/test_pool.py::test_in_any_order_of_calls_no_process_is_too_many_or_lost",
            ),
        ),
    ),
)


def text() -> str:
    """Return the whole page as Markdown."""
    parts = [HEAD]
    for name, limits_ in SECTIONS:
        rows_ = [(limit.what, limit.most, limit.beyond, f"`{limit.test}`") for limit in limits_]
        parts.append(f"## {name}\n\n{fields.table(('what', 'limit', 'beyond it', 'test'), rows_)}\n")
    return "".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(text(), end="")
