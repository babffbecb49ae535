// A test is a function with a sentence for a name; a failed check ends the program.
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include <string>
#include <vector>

namespace thaw_test {

struct Test {
    const char *name;
    void (*run)();
};

std::vector<Test> &tests();

struct Registered {
    Registered(const char *name, void (*run)()) { tests().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char *file, int line, const std::string &why) {
    fprintf(stderr, "%s:%d: %s\n", file, line, why.c_str());
    exit(1);
}

}  // namespace thaw_test

#define TEST(name)                                                    \
    static void name();                                               \
    static const thaw_test::Registered registered_##name(#name, name); \
    static void name()

#define CHECK(condition) \
    do {                 \
        if (!(condition)) thaw_test::fail(__FILE__, __LINE__, #condition); \
    } while (0)

#define CHECK_EQ(got, wanted)                                                                             \
    do {                                                                                                  \
        const auto got_ = (got);                                                                          \
        const auto wanted_ = (wanted);                                                                    \
        if (!(got_ == wanted_))                                                                           \
            thaw_test::fail(__FILE__, __LINE__,                                                           \
                            std::string(#got " is ") + std::to_string(got_) + ", not " + std::to_string(wanted_)); \
    } while (0)

// A call of the C ABI that must succeed.
#define OK(call)                                                                                             \
    do {                                                                                                     \
        const int status_ = (call);                                                                          \
        if (status_ != THAW_OK)                                                                              \
            thaw_test::fail(__FILE__, __LINE__,                                                              \
                            std::string(#call " is ") + std::to_string(status_) + ": " + thaw_error());      \
    } while (0)

// A call of the C ABI that must fail, with these words in its error sentence.
#define REFUSED(call, wanted, words)                                                                         \
    do {                                                                                                     \
        const int status_ = (call);                                                                          \
        if (status_ != (wanted) || std::string(thaw_error()).find(words) == std::string::npos)               \
            thaw_test::fail(__FILE__, __LINE__,                                                              \
                            std::string(#call " is ") + std::to_string(status_) + ": " + thaw_error());      \
    } while (0)
