"""All rules over a deployment."""

import re

from scripts.lib.diagnosis import archive_rules, config_rules, model_rules, server_rules
from scripts.lib.diagnosis.deployment import Deployment
from scripts.lib.diagnosis.finding import Finding, Severity
from scripts.lib.diagnosis.settings import Served, served

_ORDER = list(Severity)
#: Codes that say why a model isn't batched or its workers aren't counted, so that the general finding needn't.
_REASONS = frozenset(
    {"models-version", "models-key", "models-number", "yaml-key", "yaml-value", "yaml-workers", "manifest-undeclared"}
)
#: Those that may concern any model.
_REASONS_FOR_ALL = frozenset({"ignored-key", "models-name", "models-cut", "models-json"})
_GENERAL = frozenset({"batching-off", "workers-default"})


def diagnose(deployment: Deployment) -> list[Finding]:
    """Every finding, the worst first."""
    rules = (*config_rules.RULES, *model_rules.RULES, *archive_rules.RULES, *server_rules.RULES)
    found = list(dict.fromkeys(finding for rule in rules for finding in rule(deployment)))
    models = {model.title: model for model in served(deployment)}
    kept = [
        finding for finding in found if finding.code not in _GENERAL or not _explained(models.get(finding.where), found)
    ]
    return sorted(kept, key=lambda finding: _ORDER.index(finding.severity))


def _explained(model: Served | None, found: list[Finding]) -> bool:
    if model is None:  # of the live server, which no file explains
        return False
    concerned = re.compile(rf"(?<!\w)({re.escape(model.name)}|{re.escape(model.stored.file)})(?!\w)")
    return any(
        finding.code in _REASONS_FOR_ALL or (finding.code in _REASONS and concerned.search(finding.where))
        for finding in found
    )
