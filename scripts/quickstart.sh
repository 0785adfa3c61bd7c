#!/usr/bin/env bash
# From a fresh clone to batched answers: makes .venv, installs, builds model_store/minilm.mar, starts TorchServe, sends
# sample requests, and serves until Ctrl-C.
#
#   bash scripts/quickstart.sh [--once] [--model smollm2]
#
#   --once            stop after the samples
#   --model smollm2   a small chat model in place of MiniLM's embeddings; its answer is streamed
set -euo pipefail

case "${1:-}" in
-h | --help)
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

environment ""
case " $* " in
*smollm2*) smollm2 ;;
esac
exec "$python" -m scripts demo "$@"
