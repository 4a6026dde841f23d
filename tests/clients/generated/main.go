// The Go module made by `make sdks`: `client ADDRESS VECTORS`. See the README beside this file.
package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
	"time"

	oldproto "github.com/golang/protobuf/proto"
	v1 "github.com/penstock/penstock/gen/go/penstock/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

type seenMap map[string]string

type vector struct {
	Name, Kind string
	Messages   []string
	Expect     seenMap
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// collector folds the events of a Chat into answers.
type collector struct {
	next     uint64
	seen     seenMap
	tools    map[uint32][]*v1.ToolCallDelta
	finished bool
	failed   string
}

func (c *collector) add(key string, index uint32, text string) {
	c.seen[fmt.Sprintf("%s.%d", key, index)] += text
}

func (c *collector) feed(event *v1.ChatResponse) {
	if c.finished {
		c.failed = "PROTOCOL"
	}
	if delta := event.GetDelta(); delta != nil {
		if delta.Seq != c.next {
			c.failed = "PROTOCOL"
		}
		c.next++
		c.add("text", delta.Index, delta.Text)
		c.add("reasoning", delta.Index, delta.Reasoning)
		for _, id := range delta.TokenIds {
			c.add("ids", delta.Index, fmt.Sprintf("%d,", id))
		}
		for _, piece := range delta.ToolCalls {
			calls := c.tools[delta.Index]
			for uint32(len(calls)) <= piece.Index {
				calls = append(calls, &v1.ToolCallDelta{})
			}
			call := calls[piece.Index]
			call.Id, call.Name, call.Arguments = call.Id+piece.Id, call.Name+piece.Name, call.Arguments+piece.Arguments
			c.tools[delta.Index] = calls
		}
	}
	if end := event.GetFinished(); end != nil {
		c.finished = true
		for _, result := range end.Sequences {
			c.add("finish", result.Index, strings.TrimPrefix(result.FinishReason.String(), "FINISH_REASON_"))
			c.add("count", result.Index, fmt.Sprint(result.TokenCount))
			switch stop := result.MatchedStop.(type) {
			case *v1.SequenceResult_StopString:
				c.add("stop", result.Index, stop.StopString)
			case *v1.SequenceResult_StopTokenId:
				c.add("stop", result.Index, fmt.Sprint(stop.StopTokenId))
			}
		}
	}
}

func (c *collector) result() seenMap {
	if c.failed == "" && !c.finished {
		c.failed = "TRUNCATED_STREAM"
	}
	if c.failed != "" {
		return seenMap{"error": c.failed}
	}
	for index, calls := range c.tools {
		lines := []string{}
		for _, call := range calls {
			lines = append(lines, call.Id+"|"+call.Name+"|"+call.Arguments)
		}
		c.add("tools", index, strings.Join(lines, "\n"))
	}
	for key, value := range c.seen {
		if strings.HasPrefix(key, "ids.") {
			c.seen[key] = strings.TrimSuffix(value, ",")
		}
	}
	return c.seen
}

func newCollector() *collector {
	return &collector{seen: seenMap{}, tools: map[uint32][]*v1.ToolCallDelta{}}
}

func stream(messages [][]byte) seenMap {
	c := newCollector()
	for _, message := range messages {
		event := &v1.ChatResponse{}
		check(proto.Unmarshal(message, event))
		c.feed(event)
	}
	return c.result()
}

func request(messages [][]byte) seenMap {
	first, again := &v1.ChatRequest{}, &v1.ChatRequest{}
	check(proto.Unmarshal(messages[0], first))
	wire, err := proto.Marshal(first)
	check(err)
	check(proto.Unmarshal(wire, again))
	seen := seenMap{"temperature": "unset", "top_k": "unset", "do_sample": "unset", "seed": "unset"}
	if len(again.Messages) > 0 {
		seen["content"] = again.Messages[0].Content
	}
	if config := again.Config; config != nil {
		if config.Temperature != nil {
			seen["temperature"] = fmt.Sprint(*config.Temperature)
		}
		if config.TopK != nil {
			seen["top_k"] = fmt.Sprint(*config.TopK)
		}
		if config.DoSample != nil {
			seen["do_sample"] = fmt.Sprint(*config.DoSample)
		}
		if config.Seed != nil {
			seen["seed"] = fmt.Sprint(*config.Seed)
		}
	}
	return seen
}

func details(from *spb.Status) seenMap {
	seen := seenMap{"code": fmt.Sprint(from.Code), "message": from.Message}
	for _, detail := range status.FromProto(from).Details() {
		switch known := detail.(type) {
		case *errdetails.ErrorInfo:
			seen["reason"] = known.Reason
		case *errdetails.BadRequest:
			seen["field"], seen["description"] = known.FieldViolations[0].Field, known.FieldViolations[0].Description
		case *errdetails.RetryInfo:
			seen["retry_ms"] = fmt.Sprint(known.RetryDelay.Seconds*1000 + int64(known.RetryDelay.Nanos)/1e6)
		}
	}
	return seen
}

func statusError(messages [][]byte) seenMap {
	from := &spb.Status{}
	// Of whatever age the types of google.rpc are.
	check(oldproto.Unmarshal(messages[0], from))
	return details(from)
}

func verdict(seen, expect seenMap) string {
	keys := []string{}
	for _, one := range []seenMap{seen, expect} {
		for key := range one {
			keys = append(keys, key)
		}
	}
	sort.Strings(keys)
	for _, key := range keys {
		if seen[key] != expect[key] {
			return fmt.Sprintf("wrong %s %q", key, seen[key])
		}
	}
	return "ok"
}

func vectors(path string) {
	text, err := os.ReadFile(path)
	check(err)
	var file struct{ Vectors []vector }
	check(json.Unmarshal(text, &file))
	kinds := map[string]func([][]byte) seenMap{"stream": stream, "request": request, "error": statusError}
	for _, one := range file.Vectors {
		messages := [][]byte{}
		for _, message := range one.Messages {
			data, err := hex.DecodeString(message)
			check(err)
			messages = append(messages, data)
		}
		fmt.Println("vector", one.Name, verdict(kinds[one.Kind](messages), one.Expect))
	}
}

func chat(client v1.TextServiceClient, tokens uint32) (seenMap, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	events, err := client.Chat(ctx, &v1.ChatRequest{
		Messages: []*v1.Message{{Role: "user", Content: "What is Penstock?"}},
		Config:   &v1.GenerationConfig{MaxNewTokens: proto.Uint32(tokens)},
	})
	check(err)
	c := newCollector()
	for {
		event, err := events.Recv()
		if err == io.EOF {
			return c.result(), nil
		}
		if err != nil {
			return nil, err
		}
		c.feed(event)
	}
}

func main() {
	vectors(os.Args[2])
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	check(err)
	client := v1.NewTextServiceClient(connection)
	answer, err := chat(client, 64)
	check(err)
	fmt.Println("chat", hex.EncodeToString([]byte(answer["text.0"])))
	_, err = chat(client, 0)
	fmt.Println("error", details(status.Convert(err).Proto())["field"])
}
