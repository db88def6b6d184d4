"""Who may be a worker: gives each its own credential, in exchange for the workers' token.

Invariants: a credential carries a name that only the holder of its key can use (rlharvest.accounts.owns), and is good for
that name's subjects alone; without an account nothing is signed and nothing is checked. Needs no leadership and no state.
"""

from __future__ import annotations

from rlharvest import accounts
from rlharvest.access import Access, Role
from rlharvest.credentials import Tokens, check_exposure
from rlharvest.errors import InvalidField
from rlharvest.grants import grant
from rlharvest.v1 import fleet_pb2

from rlharvest_coordinator.settings import CoordinatorSettings


class Admission:
    """Signs credentials of workers.

    Args:
        account: None: NATS asks for no credentials.
        seconds: a credential is good for so long.
    """

    def __init__(self, account: accounts.Account | None, seconds: float) -> None:
        self.account = account
        self.seconds = seconds

    def admit(self, request: fleet_pb2.AdmitRequest) -> fleet_pb2.AdmitReply:
        """Return a worker's credential.

        Raises:
            InvalidField: the name is not the key's, or who asks does not hold the key.
        """
        if self.account is None:
            return fleet_pb2.AdmitReply(seconds=self.seconds)
        if not accounts.owns(request.worker, request.public_key, request.proof):
            fix = "Make the name from the key, and sign it with that key."
            raise InvalidField("worker", request.worker, "not the name of the key that signed it", fix)
        given = grant("worker", request.worker)
        jwt = self.account.user(request.worker, request.public_key, given, seconds=self.seconds)
        return fleet_pb2.AdmitReply(jwt=jwt, seconds=self.seconds)


def account_of(settings: CoordinatorSettings) -> accounts.Account | None:
    """Return the NATS account that the settings name. Raises BadCredential."""
    seed = settings.nats_account_seed
    return accounts.Account(seed.get_secret_value()) if seed is not None else None


def access_of(settings: CoordinatorSettings, account: accounts.Account | None) -> Access:
    """Return whom the coordinator's gRPC server takes.

    Raises:
        InvalidField: others can reach its address, and a token is missing or weak.
    """
    host = settings.grpc_address.rpartition(":")[0]
    named: dict[Role, tuple[str, Tokens | None]] = {
        "api": ("api_token", settings.api_token),
        "worker": ("worker_token", settings.worker_token),
        "service": ("service_token", settings.service_token),
    }
    for field, tokens in named.values():
        check_exposure("grpc_address", host, field, tokens)
    if settings.worker_token is None or settings.service_token is None:
        return Access()
    held = {role: tokens for role, (_, tokens) in named.items() if tokens is not None}
    return Access(held, account.worker_of if account is not None else None)
