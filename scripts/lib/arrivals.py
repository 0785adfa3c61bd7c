"""How many requests have come for a model so far, from TorchServe's metrics."""

from collections.abc import Callable, Collection

import requests
from prometheus_client.parser import text_string_to_metric_families

from scripts.lib.bounded import body_of

TIMEOUT_S = 5.0
_COUNTER = "ts_inference_requests"
_UNVERSIONED = "default"  # the label of requests whose URL names no version

#: Requests so far, or None when the server does not tell.
Arrivals = Callable[[], float | None]


def unknown() -> None:
    """Arrivals of a server whose metrics are out of reach."""


def arrivals(url: str, name: str, version: str, default: bool) -> Arrivals:
    """A counter of the requests for one version of a model.

    Args:
        url: the metrics address, without a path.
        name, version: the model.
        default: whether requests without a version go there too.
    """
    versions: set[str | None] = {version, _UNVERSIONED} if default else {version}

    def read() -> float | None:
        try:
            with requests.Session() as session:
                session.trust_env = False
                with session.get(f"{url}/metrics", timeout=TIMEOUT_S, stream=True) as response:
                    if not response.ok:
                        return None
                    return _count(body_of(response, TIMEOUT_S).decode(), name, versions)
        except (requests.RequestException, ValueError):
            return None

    return read


def _count(exposition: str, name: str, versions: Collection[str | None]) -> float | None:
    """Sum of the versions' series; None when the counter is not published (metrics_mode is not prometheus).

    Raises ValueError for what is not the Prometheus text format.
    """
    for family in text_string_to_metric_families(exposition):
        if family.name == _COUNTER:
            return sum(
                float(sample.value)
                for sample in family.samples
                if sample.name == f"{_COUNTER}_total"
                and sample.labels.get("model_name") == name
                and sample.labels.get("model_version") in versions
            )
    return None
