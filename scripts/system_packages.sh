#!/usr/bin/env bash
# Install what the tests need of the system and is missing here: Debian's or Ubuntu's packages, by apt-get.
#
# It says what it is about to install.  Without root it uses sudo if that asks for no password; where it may not
# install, it prints the one line that does, and fails.
set -euo pipefail

missing=()
needs() { command -v "$1" >/dev/null || missing+=("${@:2}"); }
needs make make
needs g++ g++
# some distributions ship python3 without ensurepip, which venv needs
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
# container tests run against a real engine: scripts/engine.sh starts one, unless DOCKER_HOST names one
needs dockerd docker.io iptables
needs iptables iptables
needs busybox busybox-static
# a private registry of images
needs docker-registry docker-registry
# TLS in front of the gateway, as documented
needs nginx nginx-light
needs openssl openssl
# shaped links in network namespaces
needs ip iproute2
needs tc iproute2
# OpenWhisk's and OpenAI's npm clients
needs node nodejs
needs npm npm
# the README's commands
needs curl curl
[ ${#missing[@]} -gt 0 ] || exit 0

mapfile -t packages < <(printf '%s\n' "${missing[@]}" | sort -u)
install=(apt-get install -y -q --no-install-recommends "${packages[@]}")
as_root=()
if [ "$(id -u)" -ne 0 ]; then as_root=(sudo -n); fi
if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
    echo "setup: the tests need ${packages[*]}, which cannot be installed from here" >&2
    echo "hint: sudo apt-get update && sudo ${install[*]}" >&2
    exit 1
fi
echo "setup: installing Debian packages that the tests need: ${packages[*]}"
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "${install[@]}"
