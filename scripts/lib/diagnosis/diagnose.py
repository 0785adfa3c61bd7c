"""All rules over a deployment."""

from scripts.lib.diagnosis import archive_rules, config_rules, model_rules, server_rules
from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.finding import Finding, Severity

_ORDER = list(Severity)
#: Codes that say why a model isn't batched or its workers aren't counted, so that the general finding needn't.
_REASONS = frozenset(
    {"ignored-key", "models-name", "models-version", "models-key", "models-number", "models-cut", "models-json",
     "yaml-key", "yaml-value", "yaml-workers", "manifest-undeclared"}
)  # fmt: skip
_GENERAL = frozenset({"batching-off", "workers-default"})


def diagnose(deployment: Deployment) -> list[Finding]:
    """Every finding, the worst first."""
    rules = (*config_rules.RULES, *model_rules.RULES, *archive_rules.RULES, *server_rules.RULES)
    found = list(dict.fromkeys(finding for rule in rules for finding in rule(deployment)))
    explained = any(finding.code in _REASONS for finding in found)
    kept = [finding for finding in found if not (explained and finding.code in _GENERAL)]
    return sorted(kept, key=lambda finding: _ORDER.index(finding.severity))
