#!/usr/bin/env bash
# Make what a build without an image registry needs: base images from debootstrap trees (one with g++, for the stage that
# compiles), an image with Debian's Prometheus, and a folder of wheels. Needs root, debootstrap, a running Docker engine and
# a package index for pip.
#
#   deploy/docker/offline.sh            base images, wheels
#   deploy/docker/offline.sh --prometheus   and the Prometheus image
#
# Afterwards: source deploy/docker/offline.env && docker-compose up --build
set -euo pipefail
cd "$(dirname "$0")/../.."
suite=${SUITE:-bookworm}
work=${WORK_DIR:-$(mktemp -d)}
python=${PYTHON:-python3}

import_tree() { # image, extra packages
  if docker image inspect "$1" >/dev/null 2>&1; then
    echo "$1 is there already"
    return
  fi
  echo "making $1 from a debootstrap tree"
  debootstrap --variant=minbase --include="$2" "$suite" "$work/$1" >"$work/$1.log" 2>&1 ||
    { tail -20 "$work/$1.log" >&2; exit 1; }
  # As slim as a registry's slim image: no archives and lists of packages, no manuals and translations.
  tar -C "$work/$1" --exclude=./dev --exclude=./proc --exclude=./sys --exclude='./var/cache/apt/*' \
    --exclude='./var/lib/apt/lists/*' --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' \
    --exclude='./usr/share/locale/*' -c . | docker import - "$1" >/dev/null
  rm -rf "${work:?}/$1"
}

import_tree penstock-base python3,python3-venv
import_tree penstock-build-base python3,python3-venv,g++
echo "collecting wheels"
# The CPU build of torch first: a plain range could bring gigabytes of CUDA.
"$python" -m pip download -q --no-deps --dest deploy/docker/wheels "torch==${TORCH_VERSION:-2.13.0}"
"$python" -m pip wheel -q --find-links deploy/docker/wheels --wheel-dir deploy/docker/wheels \
  "torch==${TORCH_VERSION:-2.13.0}" hatchling cyclonedx-bom ./clients/python ".[tokenizer,router,generation,gateway,redis,tracing]"
# The images build penstock from source; what they need is in the folder, so they never ask an index.
rm -f deploy/docker/wheels/penstock-*.whl deploy/docker/wheels/penstock_client-*.whl
{
  echo 'export PENSTOCK_BASE=penstock-base PENSTOCK_BUILD_BASE=penstock-build-base PENSTOCK_PIP_ARGS=--no-index'
  echo 'export PROMETHEUS_IMAGE=penstock-prometheus'
} >deploy/docker/offline.env

if [[ "${1:-}" == --prometheus ]]; then
  import_tree penstock-prometheus-base prometheus
  docker build -q -t penstock-prometheus - <<'EOF'
FROM penstock-prometheus-base
RUN mkdir -p /prometheus && chown nobody /prometheus
USER nobody
ENTRYPOINT ["/usr/bin/prometheus"]
EOF
fi
echo "ready: source deploy/docker/offline.env && docker-compose up --build"
