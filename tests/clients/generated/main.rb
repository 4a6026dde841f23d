# The gem made by `make sdks`: `ruby main.rb ADDRESS VECTORS`. See the README beside this file.
require "json"
require "google/protobuf/well_known_types"
require "google/rpc/error_details_pb"
require "google/rpc/status_pb"
require "penstock/v1/text_services_pb"

V1 = Penstock::V1

# Folds the events of a Chat into answers.
class Collector
  def initialize
    @next = 0
    @seen = Hash.new { |map, key| map[key] = String.new }
    @ids = Hash.new { |map, key| map[key] = [] }
    @tools = Hash.new { |map, key| map[key] = [] }
    @finished = false
    @failed = nil
  end

  def feed(event)
    @failed = "PROTOCOL" if @finished
    take(event.delta) if event.delta
    return unless event.finished

    @finished = true
    event.finished.sequences.each { |result| finish(result) }
  end

  def take(delta)
    @failed = "PROTOCOL" if delta.seq != @next
    @next += 1
    @seen["text.#{delta.index}"] << delta.text
    @seen["reasoning.#{delta.index}"] << delta.reasoning
    @ids[delta.index].concat(delta.token_ids.to_a)
    delta.tool_calls.each do |piece|
      call = (@tools[delta.index][piece.index] ||= [String.new, String.new, String.new])
      [piece.id, piece.name, piece.arguments].each_with_index { |text, part| call[part] << text }
    end
  end

  def finish(result)
    @seen["finish.#{result.index}"] = result.finish_reason.to_s.delete_prefix("FINISH_REASON_")
    @seen["count.#{result.index}"] = result.token_count.to_s
    stop = result.matched_stop
    @seen["stop.#{result.index}"] = result.public_send(stop).to_s if stop
  end

  def result
    @failed ||= "TRUNCATED_STREAM" unless @finished
    return { "error" => @failed } if @failed

    @ids.each { |index, ids| @seen["ids.#{index}"] = ids.join(",") }
    @tools.each { |index, calls| @seen["tools.#{index}"] = calls.map { |call| call.join("|") }.join("\n") }
    @seen
  end
end

def stream(messages)
  collector = Collector.new
  messages.each { |message| collector.feed(V1::ChatResponse.decode(message)) }
  collector.result
end

def request(messages)
  again = V1::ChatRequest.decode(V1::ChatRequest.encode(V1::ChatRequest.decode(messages.first)))
  config = again.config || V1::GenerationConfig.new
  told = lambda do |name|
    next "unset" unless config.public_send("has_#{name}?")

    value = config.public_send(name)
    value.is_a?(Float) ? format("%g", value) : value.to_s
  end
  content = again.messages.empty? ? "" : again.messages.first.content
  { "content" => content, **%w[temperature top_k do_sample seed].to_h { |name| [name, told.call(name)] } }
end

def details(status)
  seen = { "code" => status.code.to_s, "message" => status.message }
  status.details.each do |detail|
    if (info = detail.unpack(Google::Rpc::ErrorInfo))
      seen["reason"] = info.reason
    elsif (bad = detail.unpack(Google::Rpc::BadRequest))
      seen["field"] = bad.field_violations.first.field
      seen["description"] = bad.field_violations.first.description
    elsif (retry_info = detail.unpack(Google::Rpc::RetryInfo))
      delay = retry_info.retry_delay
      seen["retry_ms"] = (delay.seconds * 1000 + delay.nanos / 1_000_000).to_s
    end
  end
  seen
end

def error(messages)
  details(Google::Rpc::Status.decode(messages.first))
end

JSON.parse(File.read(ARGV[1], encoding: "UTF-8"))["vectors"].each do |vector|
  seen = send(vector["kind"], vector["messages"].map { |message| [message].pack("H*") })
  expect = vector["expect"]
  wrong = (seen.keys | expect.keys).sort.find { |key| seen.fetch(key, "").dup.force_encoding("UTF-8") != expect.fetch(key, "") }
  puts "vector #{vector["name"]} #{wrong ? "wrong #{wrong} #{seen.fetch(wrong, "")}" : "ok"}"
end

client = V1::TextService::Stub.new(ARGV[0], :this_channel_is_insecure, timeout: 120)
ask = lambda do |tokens|
  config = V1::GenerationConfig.new(max_new_tokens: tokens)
  V1::ChatRequest.new(messages: [V1::Message.new(role: "user", content: "What is Penstock?")], config: config)
end
collector = Collector.new
client.chat(ask.call(64)).each { |event| collector.feed(event) }
puts "chat #{collector.result["text.0"].unpack1("H*")}"
begin
  client.chat(ask.call(0)).each { |event| event }
rescue GRPC::BadStatus => refused
  puts "error #{details(Google::Rpc::Status.decode(refused.metadata["grpc-status-details-bin"]))["field"]}"
end
