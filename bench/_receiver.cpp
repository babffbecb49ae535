// The ceiling: ranged GETs over keep-alive connections into memory that is already there.  No checks, no pacing.
//
//   receiver HOST PORT PATH N_BYTES CONNECTIONS   ->   one JSON line: seconds and CPU seconds of the transfer alone
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

static constexpr size_t kChunk = 8u << 20;  // as fetchd's

[[noreturn]] static void fail(const char* what) {
    std::perror(what);
    std::exit(1);
}

static int connect_to(const char* host, const char* port) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, port, &hints, &found) != 0) fail("getaddrinfo");
    int fd = socket(found->ai_family, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen) != 0) fail("connect");
    freeaddrinfo(found);
    return fd;
}

// Reads the response head; what came of the body with it is moved to `target`.  Returns how much that was.
static size_t read_head(int fd, char* target) {
    char buffer[16384];
    size_t have = 0;
    for (;;) {
        ssize_t n = recv(fd, buffer + have, sizeof buffer - have - 1, 0);
        if (n <= 0) fail("recv head");
        have += static_cast<size_t>(n);
        buffer[have] = 0;
        if (char* end = std::strstr(buffer, "\r\n\r\n")) {
            if (std::strncmp(buffer + 9, "206", 3) != 0) { std::fprintf(stderr, "%.60s\n", buffer); std::exit(1); }
            size_t body = have - static_cast<size_t>(end + 4 - buffer);
            std::memcpy(target, end + 4, body);
            return body;
        }
        if (have == sizeof buffer - 1) { std::fputs("head too long\n", stderr); std::exit(1); }
    }
}

static double cpu_seconds() {
    rusage u{};
    getrusage(RUSAGE_SELF, &u);
    return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

int main(int argc, char** argv) {
    if (argc != 6) return 2;
    const size_t n_bytes = std::strtoull(argv[4], nullptr, 10);
    const int connections = std::atoi(argv[5]);
    void* memory = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    std::memset(memory, 1, n_bytes);

    std::atomic<size_t> next{0};
    auto reader = [&] {
        int fd = connect_to(argv[1], argv[2]);
        for (size_t at; (at = next.fetch_add(kChunk)) < n_bytes;) {
            size_t want = std::min(kChunk, n_bytes - at);
            std::string request = std::string("GET ") + argv[3] + " HTTP/1.1\r\nHost: " + argv[1] +
                                  "\r\nRange: bytes=" + std::to_string(at) + "-" + std::to_string(at + want - 1) +
                                  "\r\n\r\n";
            if (send(fd, request.data(), request.size(), 0) != static_cast<ssize_t>(request.size())) fail("send");
            char* target = static_cast<char*>(memory) + at;
            size_t done = read_head(fd, target);
            while (done < want) {
                ssize_t n = recv(fd, target + done, want - done, 0);
                if (n <= 0) fail("recv");
                done += static_cast<size_t>(n);
            }
        }
        close(fd);
    };
    const double cpu = cpu_seconds();
    const auto began = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int i = 0; i < connections; ++i) threads.emplace_back(reader);
    for (auto& t : threads) t.join();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
    std::printf("{\"seconds\": %.6f, \"cpu_s\": %.6f}\n", seconds.count(), cpu_seconds() - cpu);
}
