// A failure inside the library, which the C ABI (or a test) catches: a status and a sentence.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <string>

#include "thaw/params.h"

namespace thaw {

class Fault : public std::exception {
   public:
    Fault(thaw_status status, std::string message) : status(status), message(std::move(message)) {}
    const char *what() const noexcept override { return message.c_str(); }

    thaw_status status;
    std::string message;
};

__attribute__((format(printf, 1, 2))) inline std::string format(const char *pattern, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

}  // namespace thaw
