// native_tests [--old-kernel] DIR [WORD]: runs every test whose name contains WORD; DIR has the vectors of the formats.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>

#include "check.h"
#include "support.h"

std::vector<thaw_test::Test> &thaw_test::tests() {
    static std::vector<Test> all;
    return all;
}

// From now on futex_waitv is an unknown call, as before Linux 5.16.
static void become_an_older_kernel() {
    constexpr unsigned kFutexWaitv = 449;
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kFutexWaitv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program = {sizeof code / sizeof *code, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "--old-kernel") == 0) become_an_older_kernel(), argc--, argv++;
    if (argc < 2) {
        fprintf(stderr, "usage: %s VECTORS [WORD]\n", argv[0]);
        return 2;
    }
    if (strcmp(argv[1], "--misuse") == 0 && argc > 2) return thaw_test::misuse(argv[2]);
    thaw_test::vectors_directory = argv[1];
    int n = 0;
    for (const auto &test : thaw_test::tests()) {
        if (argc > 2 && strstr(test.name, argv[2]) == nullptr) continue;
        printf("%s\n", test.name);
        fflush(stdout);
        test.run();
        n++;
    }
    printf("%d passed\n", n);
    return n > 0 ? 0 : 1;
}
