"""What every service does around its work: read its settings, set logging up, run, and say in one line why it could not.

Exit status: 0 after a stop in order, 1 when it could not go on, 2 for a setting that cannot be used.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import structlog
from pydantic import ValidationError

from rlharvest import logs
from rlharvest.errors import RlharvestError
from rlharvest.settings import ServiceSettings

log = structlog.get_logger(__name__)

Settings = TypeVar("Settings", bound=ServiceSettings)

BAD_SETTING = 2
FAILED = 1


def read_settings(kind: type[Settings], **given: Any) -> Settings:
    """Return the settings from the environment; `given` values that are not None win over it.

    Ends the process with BAD_SETTING when one cannot be used: each is named with its variable, its value and the problem.
    """
    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            name = "RLHARVEST_" + "_".join(str(part) for part in problem["loc"]).upper()
            print(f"{name} = {problem.get('input')!r}: {problem['msg']}", file=sys.stderr)
    except OSError as error:  # a secret's file
        print(f"{error.filename}: {error.strerror}. A variable RLHARVEST_…_FILE names it.", file=sys.stderr)
    sys.exit(BAD_SETTING)


def run(service: str, settings: ServiceSettings, serve: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
    """Serve until told to stop, then end the process.

    The interpreter is not torn down: with torch in it that takes seconds, in which a spot machine may be gone, and there is
    nothing left to do.
    """
    logs.configure(service, level=settings.log_level, style=settings.log_format)
    status = 0
    try:
        asyncio.run(serve())
    except RlharvestError as error:
        log.error(f"{service}.stopped", error=str(error))
        status = FAILED
    except Exception:
        log.exception(f"{service}.crashed")
        status = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
