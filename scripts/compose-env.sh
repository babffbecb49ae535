#!/usr/bin/env bash
# The secrets of a compose installation, generated once into .env (mode 0600, never committed), and on stdout what the
# thaw command needs to find it:
#
#   eval "$(scripts/compose-env.sh)"
#
# Variables that are set when .env is made go into it: THAW_PORT, DOCKER_SOCKET, THAW_VERSION.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

secret() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
uuid() { cat /proc/sys/kernel/random/uuid; }

if [ ! -s .env ]; then
    socket=${DOCKER_SOCKET:-${DOCKER_HOST:-/var/run/docker.sock}}
    umask 077
    cat >.env.part <<ENV
# Made by scripts/compose-env.sh.  Secrets: keep it private, and keep it, as the state server's files outlive a restart.
THAW_VERSION=${THAW_VERSION:-0.1.0}
THAW_IMAGE_PREFIX=${THAW_IMAGE_PREFIX:-thaw}
THAW_PORT=${THAW_PORT:-3233}
THAW_STORE_PORT=${THAW_STORE_PORT:-8333}
DOCKER_SOCKET=${socket#unix://}
THAW_STATE_PASSWORD=$(secret)
THAW_RELAY_PASSWORD=$(secret)
THAW_STORE_KEY=$(secret)
THAW_STORE_SECRET=$(secret)
THAW_FIRST_KEY=$(uuid):$(secret)$(secret)
ENV
    mv .env.part .env
    echo "compose-env: made .env" >&2
fi
# shellcheck disable=SC1091  it is made above
. ./.env
umask 077
mkdir -p .cache
printf 'APIHOST=http://127.0.0.1:%s\nAUTH=%s\nNAMESPACE=_\n' "$THAW_PORT" "$THAW_FIRST_KEY" >.cache/compose.wskprops
cat <<EXPORTS
export WSK_CONFIG_FILE=$PWD/.cache/compose.wskprops
export THAW_S3_ENDPOINT=http://127.0.0.1:$THAW_STORE_PORT
export AWS_ACCESS_KEY_ID=$THAW_STORE_KEY AWS_SECRET_ACCESS_KEY=$THAW_STORE_SECRET AWS_REGION=us-east-1
EXPORTS
