// The jar of the project made by `make sdks`: `java Main ADDRESS VECTORS`. See the README beside this file.
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.ListValue;
import com.google.protobuf.Struct;
import com.google.protobuf.Value;
import com.google.protobuf.util.JsonFormat;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import com.google.rpc.Status;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.penstock.v1.ChatDelta;
import io.penstock.v1.ChatRequest;
import io.penstock.v1.ChatResponse;
import io.penstock.v1.GenerationConfig;
import io.penstock.v1.Message;
import io.penstock.v1.SequenceResult;
import io.penstock.v1.TextServiceGrpc;
import io.penstock.v1.ToolCallDelta;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;

public final class Main {
  /** Folds the events of a Chat into answers. */
  private static final class Collector {
    private long next = 0;
    private boolean finished = false;
    private String failed = "";
    private final Map<String, String> seen = new TreeMap<>();
    private final Map<Integer, List<Long>> ids = new TreeMap<>();
    private final Map<Integer, List<String[]>> tools = new TreeMap<>();

    void feed(ChatResponse event) {
      if (finished) {
        failed = "PROTOCOL";
      }
      if (event.hasDelta()) {
        take(event.getDelta());
      }
      if (event.hasFinished()) {
        finished = true;
        event.getFinished().getSequencesList().forEach(this::finish);
      }
    }

    private void add(String key, int index, String text) {
      seen.merge(key + "." + index, text, String::concat);
    }

    private void take(ChatDelta delta) {
      if (delta.getSeq() != next++) {
        failed = "PROTOCOL";
      }
      add("text", delta.getIndex(), delta.getText());
      add("reasoning", delta.getIndex(), delta.getReasoning());
      for (int id : delta.getTokenIdsList()) {
        ids.computeIfAbsent(delta.getIndex(), index -> new ArrayList<>()).add(Integer.toUnsignedLong(id));
      }
      List<String[]> calls = tools.computeIfAbsent(delta.getIndex(), index -> new ArrayList<>());
      for (ToolCallDelta piece : delta.getToolCallsList()) {
        while (calls.size() <= piece.getIndex()) {
          calls.add(new String[] {"", "", ""});
        }
        String[] call = calls.get(piece.getIndex());
        call[0] += piece.getId();
        call[1] += piece.getName();
        call[2] += piece.getArguments();
      }
    }

    private void finish(SequenceResult result) {
      add("finish", result.getIndex(), result.getFinishReason().name().replace("FINISH_REASON_", ""));
      add("count", result.getIndex(), String.valueOf(result.getTokenCount()));
      switch (result.getMatchedStopCase()) {
        case STOP_STRING:
          add("stop", result.getIndex(), result.getStopString());
          break;
        case STOP_TOKEN_ID:
          add("stop", result.getIndex(), Integer.toUnsignedString(result.getStopTokenId()));
          break;
        default:
          break;
      }
    }

    Map<String, String> result() {
      if (failed.isEmpty() && !finished) {
        failed = "TRUNCATED_STREAM";
      }
      if (!failed.isEmpty()) {
        return Map.of("error", failed);
      }
      ids.forEach((index, list) -> add("ids", index, list.stream().map(String::valueOf).collect(Collectors.joining(","))));
      tools.forEach(
          (index, calls) ->
              add("tools", index, calls.stream().map(call -> String.join("|", call)).collect(Collectors.joining("\n"))));
      return seen;
    }
  }

  private static Map<String, String> stream(List<byte[]> messages) throws InvalidProtocolBufferException {
    Collector collector = new Collector();
    for (byte[] message : messages) {
      collector.feed(ChatResponse.parseFrom(message));
    }
    return collector.result();
  }

  private static Map<String, String> request(List<byte[]> messages) throws InvalidProtocolBufferException {
    ChatRequest again = ChatRequest.parseFrom(ChatRequest.parseFrom(messages.get(0)).toByteArray());
    GenerationConfig config = again.getConfig();
    Map<String, String> seen = new TreeMap<>();
    seen.put("content", again.getMessagesCount() == 0 ? "" : again.getMessages(0).getContent());
    seen.put("temperature", config.hasTemperature() ? String.format("%.0f", config.getTemperature()) : "unset");
    seen.put("top_k", config.hasTopK() ? Integer.toUnsignedString(config.getTopK()) : "unset");
    seen.put("do_sample", config.hasDoSample() ? String.valueOf(config.getDoSample()) : "unset");
    seen.put("seed", config.hasSeed() ? Long.toUnsignedString(config.getSeed()) : "unset");
    return seen;
  }

  private static Map<String, String> details(Status status) throws InvalidProtocolBufferException {
    Map<String, String> seen = new TreeMap<>();
    seen.put("code", String.valueOf(status.getCode()));
    seen.put("message", status.getMessage());
    for (Any detail : status.getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        seen.put("reason", detail.unpack(ErrorInfo.class).getReason());
      } else if (detail.is(BadRequest.class)) {
        BadRequest.FieldViolation violation = detail.unpack(BadRequest.class).getFieldViolations(0);
        seen.put("field", violation.getField());
        seen.put("description", violation.getDescription());
      } else if (detail.is(RetryInfo.class)) {
        com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
        seen.put("retry_ms", String.valueOf(delay.getSeconds() * 1000 + delay.getNanos() / 1_000_000));
      }
    }
    return seen;
  }

  private static byte[] fromHex(String text) {
    byte[] data = new byte[text.length() / 2];
    for (int i = 0; i < data.length; i++) {
      data[i] = (byte) Integer.parseInt(text.substring(2 * i, 2 * i + 2), 16);
    }
    return data;
  }

  private static String toHex(String text) {
    StringBuilder hex = new StringBuilder();
    for (byte one : text.getBytes(StandardCharsets.UTF_8)) {
      hex.append(String.format("%02x", one));
    }
    return hex.toString();
  }

  private static void vectors(String path) throws Exception {
    Struct.Builder file = Struct.newBuilder();
    JsonFormat.parser().merge(Files.readString(Path.of(path)), file);
    ListValue vectors = file.getFieldsOrThrow("vectors").getListValue();
    for (Value value : vectors.getValuesList()) {
      Map<String, Value> vector = value.getStructValue().getFieldsMap();
      List<byte[]> messages = new ArrayList<>();
      for (Value message : vector.get("messages").getListValue().getValuesList()) {
        messages.add(fromHex(message.getStringValue()));
      }
      String kind = vector.get("kind").getStringValue();
      Map<String, String> seen =
          kind.equals("stream")
              ? stream(messages)
              : kind.equals("request") ? request(messages) : details(Status.parseFrom(messages.get(0)));
      Map<String, Value> expect = vector.get("expect").getStructValue().getFieldsMap();
      TreeSet<String> keys = new TreeSet<>(seen.keySet());
      keys.addAll(expect.keySet());
      String verdict = "ok";
      for (String key : keys) {
        String wanted = expect.containsKey(key) ? expect.get(key).getStringValue() : "";
        if (!wanted.equals(seen.getOrDefault(key, ""))) {
          verdict = "wrong " + key + " " + seen.get(key);
          break;
        }
      }
      System.out.println("vector " + vector.get("name").getStringValue() + " " + verdict);
    }
  }

  private static Map<String, String> chat(ManagedChannel channel, int maxNewTokens) {
    ChatRequest request =
        ChatRequest.newBuilder()
            .addMessages(Message.newBuilder().setRole("user").setContent("What is Penstock?"))
            .setConfig(GenerationConfig.newBuilder().setMaxNewTokens(maxNewTokens))
            .build();
    Collector collector = new Collector();
    TextServiceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(120, TimeUnit.SECONDS)
        .chat(request)
        .forEachRemaining(collector::feed);
    return collector.result();
  }

  public static void main(String[] arguments) throws Exception {
    vectors(arguments[1]);
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    System.out.println("chat " + toHex(chat(channel, 64).get("text.0")));
    try {
      chat(channel, 0);
    } catch (StatusRuntimeException refused) {
      Metadata.Key<byte[]> key = Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
      System.out.println("error " + details(Status.parseFrom(refused.getTrailers().get(key))).get("field"));
    }
    channel.shutdownNow();
  }
}
