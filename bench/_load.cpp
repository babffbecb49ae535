// A load generator that costs little: keep-alive connections, one fixed request each at a time, one thread.
//
//   load PORT REQUEST_FILE CONNECTIONS SECONDS   ->   one JSON line: answers per second, p50 and p99 in ms, not_200
//
// Answers must carry Content-Length.  Addresses: 127.0.0.1 only.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;

struct Connection {
    int fd = -1;
    std::string got;
    Clock::time_point sent;
};

[[noreturn]] static void fail(const char* what) {
    std::perror(what);
    std::exit(1);
}

static void ask(Connection& c, const std::string& request) {
    c.got.clear();
    c.sent = Clock::now();
    if (send(c.fd, request.data(), request.size(), 0) != static_cast<ssize_t>(request.size())) fail("send");
}

// Whether a whole answer is there.
static bool complete(const std::string& got) {
    size_t end = got.find("\r\n\r\n");
    if (end == std::string::npos) return false;
    size_t at = got.find("ontent-"), length = 0;
    for (; at != std::string::npos && at < end; at = got.find("ontent-", at + 1)) {
        if (got.compare(at, 14, "ontent-Length:") == 0 || got.compare(at, 14, "ontent-length:") == 0) {
            length = std::strtoull(got.c_str() + at + 14, nullptr, 10);
            return got.size() >= end + 4 + length;
        }
    }
    std::fprintf(stderr, "no Content-Length: %.200s\n", got.c_str());
    std::exit(1);
}

int main(int argc, char** argv) {
    if (argc != 5) return 2;
    std::ifstream file(argv[2], std::ios::binary);
    const std::string request((std::istreambuf_iterator<char>(file)), {});
    std::vector<Connection> all(std::atoi(argv[3]));
    const int poll = epoll_create1(0);
    for (size_t i = 0; i < all.size(); ++i) {
        sockaddr_in to{};
        to.sin_family = AF_INET;
        to.sin_port = htons(static_cast<uint16_t>(std::atoi(argv[1])));
        to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        all[i].fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(all[i].fd, reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) fail("connect");
        int one = 1;
        setsockopt(all[i].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = i;
        epoll_ctl(poll, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    const auto began = Clock::now();
    const auto until = began + std::chrono::duration<double>(std::atof(argv[4]));
    for (auto& c : all) ask(c, request);
    std::vector<double> ms;
    size_t bad = 0, open = all.size();
    while (open > 0) {
        epoll_event events[64];
        const int n = epoll_wait(poll, events, 64, 60000);
        if (n <= 0) fail("no answer within a minute");
        for (int i = 0; i < n; ++i) {
            Connection& c = all[events[i].data.u64];
            char buffer[65536];
            const ssize_t count = recv(c.fd, buffer, sizeof buffer, 0);
            if (count <= 0) fail("the server closed");
            c.got.append(buffer, static_cast<size_t>(count));
            if (!complete(c.got)) continue;
            bad += c.got.compare(9, 3, "200") != 0;
            const auto now = Clock::now();
            ms.push_back(std::chrono::duration<double, std::milli>(now - c.sent).count());
            if (now < until) ask(c, request);
            else close(c.fd), --open;
        }
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - began).count();
    std::sort(ms.begin(), ms.end());
    std::printf("{\"per_s\": %.2f, \"answers\": %zu, \"not_200\": %zu, \"p50_ms\": %.3f, \"p99_ms\": %.3f}\n",
                ms.size() / seconds, ms.size(), bad, ms[ms.size() / 2], ms[ms.size() * 99 / 100]);
}
