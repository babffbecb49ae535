#include "json.h"

#include <stdlib.h>

#include "check.h"

namespace thaw_test {

namespace {

class Parser {
   public:
    explicit Parser(const std::string &text) : text_(text) {}

    Json value() {
        Json v;
        switch (next()) {
            case '{': object(v); break;
            case '[': array(v); break;
            case '"': v.text = string(); break;
            default: v.natural = natural();
        }
        return v;
    }

   private:
    // The next sign that is not space.
    char next() {
        at_ = text_.find_first_not_of(" \n", at_);
        CHECK(at_ != std::string::npos);
        return text_[at_];
    }
    bool take(char sign) {
        if (next() != sign) return false;
        at_++;
        return true;
    }

    void object(Json &v) {
        CHECK(take('{'));
        if (take('}')) return;
        do {
            CHECK(next() == '"');
            std::string name = string();
            CHECK(take(':'));
            v.members.emplace_back(std::move(name), value());
        } while (take(','));
        CHECK(take('}'));
    }

    void array(Json &v) {
        CHECK(take('['));
        if (take(']')) return;
        do v.items.push_back(value());
        while (take(','));
        CHECK(take(']'));
    }

    uint64_t natural() {
        char *end = nullptr;
        const char *begin = text_.c_str() + at_;
        const uint64_t value = strtoull(begin, &end, 10);
        CHECK(end != begin);
        at_ += size_t(end - begin);
        return value;
    }

    std::string string() {
        std::string s;
        for (at_++; text_[at_] != '"'; at_++) {
            CHECK(at_ + 1 < text_.size());
            if (text_[at_] == '\\')
                escape(s);
            else
                s += text_[at_];
        }
        at_++;
        return s;
    }

    // \uXXXX of a character that is two or three bytes of UTF-8; the vectors have no others.
    void escape(std::string &s) {
        CHECK(text_[++at_] == 'u');
        const auto code = strtoul(text_.substr(at_ + 1, 4).c_str(), nullptr, 16);
        CHECK(code >= 0x80 && (code < 0xD800 || code >= 0xE000));
        if (code < 0x800)
            s += char(0xC0 | code >> 6);
        else
            s += char(0xE0 | code >> 12), s += char(0x80 | (code >> 6 & 0x3F));
        s += char(0x80 | (code & 0x3F));
        at_ += 4;
    }

    const std::string &text_;
    size_t at_ = 0;
};

}  // namespace

Json Json::parse(const std::string &text) { return Parser(text).value(); }

const Json *Json::find(const std::string &name) const {
    for (const auto &[key, value] : members)
        if (key == name) return &value;
    return nullptr;
}

const Json &Json::operator[](const std::string &name) const {
    const Json *found = find(name);
    if (found == nullptr) fail(__FILE__, __LINE__, "no member " + name);
    return *found;
}

}  // namespace thaw_test
