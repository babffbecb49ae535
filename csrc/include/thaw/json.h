// A strict reader of whole JSON texts, which plans (and the vectors of every format) are written in.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "thaw/fault.h"

namespace thaw {

class Json {
   public:
    enum class Kind { kNull, kBool, kInteger, kReal, kString, kArray, kObject };

    // Throws Fault for anything that is not one JSON value.
    static Json parse(std::string_view text);

    Kind kind = Kind::kNull;
    bool boolean = false;
    int64_t integer = 0;
    uint64_t natural = 0;  // the integer if it is not negative; above INT64_MAX, `integer` stays INT64_MAX
    double real = 0;
    std::string text;
    std::vector<Json> items;
    std::vector<std::pair<std::string, Json>> members;

    // Null when there is no such member; of two members with the same name, the last one counts.
    const Json *find(std::string_view name) const {
        const Json *found = nullptr;
        for (const auto &[key, value] : members)
            if (key == name) found = &value;
        return found;
    }
    const Json &operator[](std::string_view name) const {
        const Json *found = find(name);
        if (found == nullptr) throw Fault(THAW_BAD_ARGUMENT, "no member " + std::string(name));
        return *found;
    }
};

namespace json_detail {

class Parser {
   public:
    explicit Parser(std::string_view text) : text_(text) {}

    Json whole() {
        Json value = this->value(0);
        skip();
        if (at_ != text_.size()) refuse("something behind the value");
        return value;
    }

   private:
    static constexpr int kDeepest = 64;

    [[noreturn]] void refuse(const char *why) const {
        throw Fault(THAW_BAD_ARGUMENT, format("not JSON at byte %zu: %s", at_, why));
    }
    void skip() {
        while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) at_++;
    }
    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
    bool take(std::string_view word) {
        if (text_.substr(at_, word.size()) != word) return false;
        at_ += word.size();
        return true;
    }
    void want(std::string_view word) {
        if (!take(word)) refuse("another sign was expected");
    }

    Json value(int depth) {
        if (depth > kDeepest) refuse("too deep");
        skip();
        Json v;
        switch (peek()) {
            case '{': object(v, depth); break;
            case '[': array(v, depth); break;
            case '"': v.kind = Json::Kind::kString, v.text = string(); break;
            case 't': want("true"), v.kind = Json::Kind::kBool, v.boolean = true; break;
            case 'f': want("false"), v.kind = Json::Kind::kBool; break;
            case 'n': want("null"); break;
            default: number(v);
        }
        return v;
    }

    void object(Json &v, int depth) {
        v.kind = Json::Kind::kObject;
        want("{"), skip();
        if (take("}")) return;
        do {
            skip();
            std::string name = string();
            skip(), want(":");
            v.members.emplace_back(std::move(name), value(depth + 1));
            skip();
        } while (take(","));
        want("}");
    }

    void array(Json &v, int depth) {
        v.kind = Json::Kind::kArray;
        want("["), skip();
        if (take("]")) return;
        do {
            v.items.push_back(value(depth + 1));
            skip();
        } while (take(","));
        want("]");
    }

    void number(Json &v) {
        const size_t begin = at_;
        const auto digits = [&] {
            const size_t from = at_;
            while (peek() >= '0' && peek() <= '9') at_++;
            if (at_ == from) refuse("a value was expected");
        };
        take("-");
        if (!take("0")) digits();
        v.kind = Json::Kind::kInteger;
        if (take(".")) v.kind = Json::Kind::kReal, digits();
        if (peek() == 'e' || peek() == 'E') {
            at_++, v.kind = Json::Kind::kReal;
            if (!take("+")) take("-");
            digits();
        }
        const std::string written(text_.substr(begin, at_ - begin));
        v.real = strtod(written.c_str(), nullptr);
        if (v.kind == Json::Kind::kReal) return;
        errno = 0;
        v.integer = strtoll(written.c_str(), nullptr, 10);
        v.natural = written[0] == '-' ? 0 : strtoull(written.c_str(), nullptr, 10);
    }

    std::string string() {
        std::string s;
        want("\"");
        while (!take("\"")) {
            if (at_ == text_.size()) refuse("a string without an end");
            const char c = text_[at_++];
            if (static_cast<unsigned char>(c) < 0x20) refuse("a control sign in a string");
            if (c == '\\')
                escape(s);
            else
                s += c;
        }
        return s;
    }

    void escape(std::string &s) {
        constexpr std::string_view kNames = "\"\\/bfnrt", kSigns = "\"\\/\b\f\n\r\t";
        if (take("u")) {
            uint32_t code = hex4();
            if (code >= 0xD800 && code < 0xDC00) {
                want("\\u");
                const uint32_t low = hex4();
                if (low < 0xDC00 || low > 0xDFFF) refuse("half a character");
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            }
            append(s, code);
            return;
        }
        const size_t which = kNames.find(peek());
        if (which == std::string_view::npos || peek() == '\0') refuse("an unknown escape");
        s += kSigns[which];
        at_++;
    }

    uint32_t hex4() {
        uint32_t code = 0;
        for (int i = 0; i < 4; i++) {
            const char c = peek();
            const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10
                            : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
            if (digit < 0) refuse("four hex digits were expected");
            code = code << 4 | uint32_t(digit);
            at_++;
        }
        return code;
    }

    static void append(std::string &s, uint32_t code) {
        if (code < 0x80) {
            s += char(code);
        } else if (code < 0x800) {
            s += char(0xC0 | code >> 6), s += char(0x80 | (code & 0x3F));
        } else if (code < 0x10000) {
            s += char(0xE0 | code >> 12), s += char(0x80 | (code >> 6 & 0x3F)), s += char(0x80 | (code & 0x3F));
        } else {
            s += char(0xF0 | code >> 18), s += char(0x80 | (code >> 12 & 0x3F));
            s += char(0x80 | (code >> 6 & 0x3F)), s += char(0x80 | (code & 0x3F));
        }
    }

    const std::string_view text_;
    size_t at_ = 0;
};

}  // namespace json_detail

inline Json Json::parse(std::string_view text) { return json_detail::Parser(text).whole(); }

inline std::string quoted(const std::string &text) {
    std::string s = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\')
            s += '\\', s += c;
        else if (static_cast<unsigned char>(c) < 0x20)
            s += format("\\u%04x", c);
        else
            s += c;
    }
    return s + "\"";
}

// The shortest text that reads back as this double; 1 is written as 1.0.
inline std::string written(double value) {
    std::string s;
    for (int digits = 1; digits <= 17; digits++) {
        s = format("%.*g", digits, value);
        if (strtod(s.c_str(), nullptr) == value) break;
    }
    return s.find_first_of(".en") == std::string::npos ? s + ".0" : s;
}

}  // namespace thaw
