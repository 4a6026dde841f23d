// The CMake package made by `make sdks`: `client ADDRESS VECTORS`. See the README beside this file.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "penstock/v1/text.grpc.pb.h"

namespace v1 = penstock::v1;
using Seen = std::map<std::string, std::string>;

// Folds the events of a Chat into answers.
class Collector {
 public:
  void Feed(const v1::ChatResponse& event) {
    if (finished_) failed_ = "PROTOCOL";
    if (event.has_delta()) Take(event.delta());
    if (!event.has_finished()) return;
    finished_ = true;
    for (const auto& result : event.finished().sequences()) Finish(result);
  }

  Seen Result() {
    if (failed_.empty() && !finished_) failed_ = "TRUNCATED_STREAM";
    if (!failed_.empty()) return {{"error", failed_}};
    for (const auto& [index, calls] : tools_) {
      for (const auto& call : calls) {
        std::string& text = At("tools", index);
        text += (text.empty() ? "" : "\n") + call.id() + "|" + call.name() + "|" + call.arguments();
      }
    }
    return seen_;
  }

 private:
  std::string& At(const std::string& key, uint32_t index) { return seen_[key + "." + std::to_string(index)]; }

  void Take(const v1::ChatDelta& delta) {
    if (delta.seq() != next_++) failed_ = "PROTOCOL";
    At("text", delta.index()) += delta.text();
    At("reasoning", delta.index()) += delta.reasoning();
    for (uint32_t id : delta.token_ids()) {
      std::string& ids = At("ids", delta.index());
      ids += (ids.empty() ? "" : ",") + std::to_string(id);
    }
    auto& calls = tools_[delta.index()];
    for (const auto& piece : delta.tool_calls()) {
      if (calls.size() <= piece.index()) calls.resize(piece.index() + 1);
      auto& call = calls[piece.index()];
      call.set_id(call.id() + piece.id());
      call.set_name(call.name() + piece.name());
      call.set_arguments(call.arguments() + piece.arguments());
    }
  }

  void Finish(const v1::SequenceResult& result) {
    const std::string prefix = "FINISH_REASON_";
    At("finish", result.index()) = v1::FinishReason_Name(result.finish_reason()).substr(prefix.size());
    At("count", result.index()) = std::to_string(result.token_count());
    if (result.matched_stop_case() == v1::SequenceResult::kStopString) {
      At("stop", result.index()) = result.stop_string();
    } else if (result.matched_stop_case() == v1::SequenceResult::kStopTokenId) {
      At("stop", result.index()) = std::to_string(result.stop_token_id());
    }
  }

  uint64_t next_ = 0;
  bool finished_ = false;
  std::string failed_;
  Seen seen_;
  std::map<uint32_t, std::vector<v1::ToolCallDelta>> tools_;
};

template <typename Type>
Type Parse(const std::string& data) {
  Type message;
  if (!message.ParseFromString(data)) throw std::runtime_error("not a message");
  return message;
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

Seen Stream(const std::vector<std::string>& messages) {
  Collector collector;
  for (const auto& message : messages) collector.Feed(Parse<v1::ChatResponse>(message));
  return collector.Result();
}

Seen Request(const std::vector<std::string>& messages) {
  const auto again = Parse<v1::ChatRequest>(Parse<v1::ChatRequest>(messages[0]).SerializeAsString());
  const auto& config = again.config();
  return {{"content", again.messages_size() ? again.messages(0).content() : ""},
          {"temperature", config.has_temperature() ? Number(config.temperature()) : "unset"},
          {"top_k", config.has_top_k() ? std::to_string(config.top_k()) : "unset"},
          {"do_sample", config.has_do_sample() ? (config.do_sample() ? "true" : "false") : "unset"},
          {"seed", config.has_seed() ? std::to_string(config.seed()) : "unset"}};
}

Seen Details(const google::rpc::Status& status) {
  Seen seen{{"code", std::to_string(status.code())}, {"message", status.message()}};
  for (const auto& detail : status.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    if (detail.UnpackTo(&info)) {
      seen["reason"] = info.reason();
    } else if (detail.UnpackTo(&bad)) {
      seen["field"] = bad.field_violations(0).field();
      seen["description"] = bad.field_violations(0).description();
    } else if (detail.UnpackTo(&retry)) {
      const auto& delay = retry.retry_delay();
      seen["retry_ms"] = std::to_string(delay.seconds() * 1000 + delay.nanos() / 1000000);
    }
  }
  return seen;
}

std::string FromHex(const std::string& hex) {
  std::string data;
  for (size_t at = 0; at + 1 < hex.size(); at += 2) data += static_cast<char>(std::stoi(hex.substr(at, 2), nullptr, 16));
  return data;
}

void Vectors(const char* path) {
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  google::protobuf::Struct root;
  if (!google::protobuf::util::JsonStringToMessage(text, &root).ok()) throw std::runtime_error("not JSON");
  for (const auto& value : root.fields().at("vectors").list_value().values()) {
    const auto& vector = value.struct_value().fields();
    std::vector<std::string> messages;
    for (const auto& message : vector.at("messages").list_value().values()) {
      messages.push_back(FromHex(message.string_value()));
    }
    const std::string& kind = vector.at("kind").string_value();
    Seen seen = kind == "stream"    ? Stream(messages)
                : kind == "request" ? Request(messages)
                                    : Details(Parse<google::rpc::Status>(messages[0]));
    const auto& expect = vector.at("expect").struct_value().fields();
    std::set<std::string> keys;
    for (const auto& [key, _] : seen) keys.insert(key);
    for (const auto& [key, _] : expect) keys.insert(key);
    std::string verdict = "ok";
    for (const auto& key : keys) {
      const std::string wanted = expect.count(key) ? expect.at(key).string_value() : "";
      if (wanted != seen[key] && verdict == "ok") verdict = "wrong " + key + " " + seen[key];
    }
    std::cout << "vector " << vector.at("name").string_value() << " " << verdict << "\n";
  }
}

grpc::Status Chat(v1::TextService::Stub& stub, uint32_t max_new_tokens, Collector& collector) {
  v1::ChatRequest request;
  auto* message = request.add_messages();
  message->set_role("user");
  message->set_content("What is Penstock?");
  request.mutable_config()->set_max_new_tokens(max_new_tokens);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  auto reader = stub.Chat(&context, request);
  for (v1::ChatResponse event; reader->Read(&event);) collector.Feed(event);
  return reader->Finish();
}

int main(int, char** arguments) {
  Vectors(arguments[2]);
  const auto stub = v1::TextService::NewStub(grpc::CreateChannel(arguments[1], grpc::InsecureChannelCredentials()));
  Collector collector;
  if (!Chat(*stub, 64, collector).ok()) return 1;
  std::cout << "chat ";
  const char* digits = "0123456789abcdef";
  const Seen answer = collector.Result();
  for (unsigned char one : answer.at("text.0")) std::cout << digits[one >> 4] << digits[one & 15];
  Collector refused;
  const auto status = Chat(*stub, 0, refused);
  std::cout << "\nerror " << Details(Parse<google::rpc::Status>(status.error_details()))["field"] << "\n";
  return 0;
}
