// Reads tests/vectors/*.json: as much of JSON as the vectors of segments use.  Anything else ends the program.
#pragma once

#include <stdint.h>

#include <string>
#include <utility>
#include <vector>

namespace thaw_test {

// A string, a natural number, an array or an object.
struct Json {
    static Json parse(const std::string &text);

    std::string text;
    uint64_t natural = 0;
    std::vector<Json> items;
    std::vector<std::pair<std::string, Json>> members;

    // Null when there is none.
    const Json *find(const std::string &name) const;
    // Fails the test when there is none.
    const Json &operator[](const std::string &name) const;
};

}  // namespace thaw_test
