#!/usr/bin/env bash
# Generate the secrets of a compose installation once, into .env (mode 0600, never committed), and print the settings
# with which the thaw command finds the installation:
#
#   eval "$(scripts/compose-env.sh)"
#
# Variables that are set when .env is made are written into it: THAW_PORT, DOCKER_SOCKET, THAW_VERSION …  An .env of an
# earlier version gets the variables that it lacks.  THAW_ENV_FILE names another file than .env, for
# docker compose --env-file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

env_file=${THAW_ENV_FILE:-.env}
properties=${THAW_ENV_FILE:+$THAW_ENV_FILE.wskprops}
properties=${properties:-$PWD/.cache/compose.wskprops}

# the socket at which the docker command itself would look for its engine
engine_socket() {
    local found=${DOCKER_SOCKET:-${DOCKER_HOST:-}}
    [ -n "$found" ] || found=$(docker context inspect --format '{{.Endpoints.docker.Host}}' 2>/dev/null) || true
    found=${found#unix://}
    case ${found:=/var/run/docker.sock} in
        /*) ;;
        *) printf 'compose-env: %s\n' "the engine at $found is not on this machine" \
               "hint: functions are reached through sockets, so run this where the engine is; or set DOCKER_SOCKET" >&2
           return 1 ;;
    esac
    [ -S "$found" ] || echo "compose-env: nothing at $found yet; if the engine listens elsewhere: DOCKER_SOCKET in $env_file" >&2
    echo "$found"
}

fail() { printf 'compose-env: %s\n' "$@" >&2; exit 1; }

# THAW_PORT is a port, or a range of ports with one for each gateway; THAW_ADDRESS is the address that publishes it
check_port() {
    [[ $THAW_PORT =~ ^[0-9]+(-[0-9]+)?$ ]] || fail "THAW_PORT=$THAW_PORT is no port (in $env_file)" \
        "hint: THAW_PORT=3233, or 3233-3234 for two gateways; THAW_ADDRESS is the address, 127.0.0.1 or 0.0.0.0 for all"
}

# The defaults that follow from other variables: the images, the memory for a host's models, and all cores but one.  A
# secret that an .env of an earlier version lacks is here too.
derived() {
    local prefix=${THAW_IMAGE_PREFIX:-thaw} version=${THAW_VERSION:-0.1.0} cores
    cores=$(nproc)
    echo "THAW_ADDRESS=127.0.0.1"
    echo "THAW_IMAGE_PYTHON=$prefix/python:$version"
    echo "THAW_IMAGE_LLM=$prefix/vllm-cpu:$version"
    echo "THAW_FETCHD_LIMIT_MB=$((${THAW_FETCHD_POOL_MB:-1024} + 512))"
    echo "THAW_DATA_CPUS=$((cores > 1 ? cores - 1 : 1))"
    echo "THAW_METRICS_TOKEN=$(secret)"
}

# add the variables that the file lacks, from the environment or else from these defaults
add_derived() {
    local line name
    [ -z "$(tail -c 1 "$env_file")" ] || echo >>"$env_file"     # an editor may leave the last line without a newline
    while read -r line; do
        name=${line%%=*}
        grep -q "^$name=" "$env_file" || echo "$name=${!name:-${line#*=}}" >>"$env_file"
    done < <(derived)
}

secret() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
uuid() { cat /proc/sys/kernel/random/uuid; }

if [ ! -s "$env_file" ]; then
    THAW_PORT=${THAW_PORT:-3233} check_port
    socket=$(engine_socket)
    umask 077
    cat >"$env_file.part" <<ENV
# Made by scripts/compose-env.sh.  Secrets: keep it private, and keep it, as the state server's files outlive a restart.
THAW_VERSION=${THAW_VERSION:-0.1.0}
THAW_IMAGE_PREFIX=${THAW_IMAGE_PREFIX:-thaw}
THAW_PORT=${THAW_PORT:-3233}
THAW_STORE_PORT=${THAW_STORE_PORT:-8333}
THAW_STEM_CELLS=${THAW_STEM_CELLS:-on}
THAW_FETCHD_POOL_MB=${THAW_FETCHD_POOL_MB:-1024}
THAW_MEMORY_MB=${THAW_MEMORY_MB:-4096}
DOCKER_SOCKET=$socket
THAW_STATE_PASSWORD=$(secret)
THAW_RELAY_PASSWORD=$(secret)
THAW_STORE_KEY=$(secret)
THAW_STORE_SECRET=$(secret)
THAW_FIRST_KEY=$(uuid):$(secret)$(secret)
ENV
    mv "$env_file.part" "$env_file"
    echo "compose-env: made $env_file" >&2
fi
chosen=$(grep -E '^THAW_(IMAGE_PREFIX|VERSION|FETCHD_POOL_MB)=' "$env_file") && eval "$chosen"
add_derived
# shellcheck disable=SC1090  the file is made above
. "$(realpath "$env_file")"
check_port
pool_mb=${THAW_FETCHD_POOL_MB:-1024}
[ "$THAW_FETCHD_LIMIT_MB" -gt "$pool_mb" ] || fail \
    "THAW_FETCHD_LIMIT_MB=$THAW_FETCHD_LIMIT_MB is no more than the $pool_mb MB of models (in $env_file)" \
    "hint: set it to THAW_FETCHD_POOL_MB and 512 more, or delete the line and run this again"
address=${THAW_ADDRESS:-127.0.0.1}
[ "$address" != 0.0.0.0 ] || address=127.0.0.1
umask 077
mkdir -p "$(dirname "$properties")"
printf 'APIHOST=http://%s:%s\nAUTH=%s\nNAMESPACE=_\n' "$address" "${THAW_PORT%%-*}" "$THAW_FIRST_KEY" >"$properties"
cat <<EXPORTS
export WSK_CONFIG_FILE=$properties
export THAW_S3_ENDPOINT=http://127.0.0.1:$THAW_STORE_PORT
export AWS_ACCESS_KEY_ID=$THAW_STORE_KEY AWS_SECRET_ACCESS_KEY=$THAW_STORE_SECRET AWS_REGION=us-east-1
unset AWS_SESSION_TOKEN AWS_PROFILE AWS_DEFAULT_PROFILE
EXPORTS
