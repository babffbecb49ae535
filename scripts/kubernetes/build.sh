#!/usr/bin/env bash
# Build Kubernetes for a cluster of tests from Debian 12's packages:   scripts/kubernetes/build.sh TARGET
#
# TARGET/bin gets the five servers of Kubernetes, built from Debian's source package with Debian's Go, and etcd,
# containerd and runc as Debian built them; TARGET/cni gets the plugins that connect pods.  TARGET appears whole or not
# at all.  It takes 6 minutes on an idle core, 2.5 GB beside TARGET meanwhile, and installs nothing but dpkg-dev.
set -euo pipefail
target=${1:?usage: scripts/kubernetes/build.sh TARGET}
suite=bookworm go=1.19
servers=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet)
as_built=(etcd-server containerd runc containernetworking-plugins)

say() { printf 'kubernetes: %s (%s s)\n' "$*" "$SECONDS" >&2; }

command -v dpkg-source >/dev/null || {
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends dpkg-dev xz-utils
} >&2
mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$work"' EXIT

# An apt of its own: most machines have no source packages in their lists, and theirs stay as they are.
mirror=${THAW_DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Release: $suite" 'Component: main' | head -1)}
: "${mirror:?no mirror of Debian $suite is known here: set THAW_DEBIAN_MIRROR}"
mkdir -p "$work"/{lists/partial,cache/archives/partial,packages,unpacked}
for kind in deb deb-src; do echo "$kind $mirror $suite main"; done >"$work/sources.list"
cat >"$work/apt.conf" <<END
Dir::State::lists "$work/lists";
Dir::Cache "$work/cache";
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "-";
Acquire::Languages "none";
APT::Sandbox::User "root";
END
export APT_CONFIG=$work/apt.conf
say "downloading from Debian $suite"
apt-get update -qq
cd "$work/packages"
apt-get source -qq --download-only kubernetes
apt-get download -qq "golang-$go-go" "golang-$go-src" golang-github-modern-go-reflect2-dev "${as_built[@]}"
for package in *.deb; do dpkg-deb -x "$package" "$work/unpacked"; done

say "unpacking the source"
source=$work/go/src/k8s.io/kubernetes
mkdir -p "$(dirname "$source")"
dpkg-source --no-check -x kubernetes_*.dsc "$source" >/dev/null
cd "$source"
# The copy of reflect2 in the source reads maps by an internal name that Go has changed since 1.18.
reflect=vendor/github.com/modern-go/reflect2
find "$reflect" -type f -delete
find "$work/unpacked/usr/share/gocode/src/github.com/modern-go/reflect2" -maxdepth 1 -type f ! -name '*_test.go' -exec cp -t "$reflect" {} +

export GOROOT=$work/unpacked/usr/lib/go-$go GOPATH=$work/go GOCACHE=$work/go-cache HOME=$work TMPDIR=$work
export GO111MODULE=off GOFLAGS=-trimpath CGO_ENABLED=0 GOGC=400
PATH=$GOROOT/bin:$PATH

# The package leaves out the API's own description, which its authors generate at a build.
say "generating the API's description"
GOBIN=$work go install ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
# -R: the packages in vendor/k8s.io are links to those in staging
described=$(grep -RlE --include='*.go' '^// *\+k8s:openapi-gen=' pkg cmd plugin vendor/k8s.io |
    grep -v -e /testdata/ -e ^vendor/k8s.io/code-generator/ -e ^vendor/k8s.io/sample- | xargs -n1 dirname | LC_ALL=C sort -u |
    sed 's,^,k8s.io/kubernetes/,' | paste -sd,)
"$work/openapi-gen" -i "$described" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" 2>/dev/null

say "building ${servers[*]}"
mkdir -p "$work/made/bin" "$work/made/cni"
version=$(sed -n '1s/.*really\([0-9.]*\)-.*/\1/p' debian/changelog)
named=
for package in client-go/pkg/version component-base/version; do
    named+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.gitVersion=v$version"
    named+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.gitMajor=${version%%.*}"
    named+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.gitMinor=$(cut -d. -f2 <<<"$version")"
done
go build -tags "providerless dockerless" -ldflags "-s -w$named" -o "$work/made/bin" "${servers[@]/#/./cmd/}"

cp -t "$work/made/bin" "$work"/unpacked/usr/bin/{etcd,containerd,containerd-shim-runc-v2,ctr} "$work/unpacked/usr/sbin/runc"
cp -t "$work/made/cni" "$work"/unpacked/usr/lib/cni/{bridge,host-local,loopback}
mv "$work/made" "$target"
chmod -R u+w "$work"
say "made $target"
