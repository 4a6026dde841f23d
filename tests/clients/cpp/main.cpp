// See ../README.md. With Debian's libgrpc++-dev.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace {

using grpc::ByteBuffer;
using grpc::ClientContext;
using grpc::Status;

const std::string SERVICE = "/penstock.v1.TextService/";
std::string folder;
std::unique_ptr<grpc::GenericStub> stub;

ByteBuffer request(const std::string& name) {
  std::ifstream file(folder + "/" + name, std::ios::binary);
  const std::string data((std::istreambuf_iterator<char>(file)), {});
  const grpc::Slice slice(data);
  return ByteBuffer(&slice, 1);
}

std::string bytes(const ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  buffer.Dump(&slices);
  std::string all;
  for (const auto& slice : slices) all.append((const char*)slice.begin(), slice.size());
  return all;
}

void save(const std::string& name, const std::vector<std::string>& messages) {
  std::ofstream file(folder + "/" + name + ".out", std::ios::binary);
  for (const auto& message : messages) {
    for (int shift = 24; shift >= 0; shift -= 8) file.put(char(message.size() >> shift));
    file << message;
  }
}

// Waits for the one operation that is on its way; false: it failed.
bool next(grpc::CompletionQueue& queue) {
  void* tag;
  bool ok;
  return queue.Next(&tag, &ok) && ok;
}

Status chat(ClientContext& context, const std::string& name, const std::function<void(const std::string&)>& message) {
  grpc::CompletionQueue queue;
  auto call = stub->PrepareCall(&context, SERVICE + "Chat", &queue);
  call->StartCall(nullptr);
  next(queue);
  call->WriteLast(request(name), grpc::WriteOptions(), nullptr);
  next(queue);
  for (;;) {
    ByteBuffer buffer;
    call->Read(&buffer, nullptr);
    if (!next(queue)) break;
    message(bytes(buffer));
  }
  Status status;
  call->Finish(&status, nullptr);
  next(queue);
  return status;
}

struct Score {
  ClientContext context;
  ByteBuffer answer;
  Status status;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;

  explicit Score(grpc::CompletionQueue& queue) {
    reader = stub->PrepareUnaryCall(&context, SERVICE + "Score", request("score"), &queue);
    reader->StartCall();
    reader->Finish(&answer, &status, nullptr);
  }
};

}  // namespace

int main(int, char** arguments) {
  folder = arguments[2];
  stub = std::make_unique<grpc::GenericStub>(grpc::CreateChannel(arguments[1], grpc::InsecureChannelCredentials()));
  {
    ClientContext context;
    std::vector<std::string> messages;
    const Status status = chat(context, "chat", [&](const std::string& message) { messages.push_back(message); });
    save("chat", messages);
    std::cout << "chat " << status.error_code() << std::endl;
  }
  {
    ClientContext context;
    int count = 0;
    const Status status = chat(context, "long", [&](const std::string&) {
      if (++count == 3) context.TryCancel();
    });
    std::cout << "cancel " << status.error_code() << std::endl;
  }
  {
    ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
    std::cout << "deadline " << chat(context, "long", [](const std::string&) {}).error_code() << std::endl;
  }
  {
    ClientContext context;
    const Status status = chat(context, "bad", [](const std::string&) {});
    if (!status.error_details().empty()) save("error", {status.error_details()});
    std::cout << "error " << status.error_code() << std::endl;
  }
  grpc::CompletionQueue queue;
  {
    Score score(queue);
    next(queue);
    save("score", {bytes(score.answer)});
    std::cout << "score " << score.status.error_code() << std::endl;
  }
  std::vector<std::unique_ptr<Score>> scores;
  for (int i = 0; i < 50; ++i) scores.push_back(std::make_unique<Score>(queue));
  int worst = 0;
  for (int i = 0; i < 50; ++i) next(queue);
  for (const auto& score : scores) worst = std::max(worst, int(score->status.error_code()));
  std::cout << "many " << worst << std::endl;
}
